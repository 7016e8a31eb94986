"""`DispatchTracer`: stands for an array in the traced function, and holds the value that stands for it."""

from typing import Any

from . import _jax
from ._value import flatten
from .errors import MaterializationError


class DispatchTracer(_jax.Tracer):
    """Stands for an array in the traced function, and holds the value that stands for it."""

    __slots__ = ("value",)

    def __init__(self, trace: Any, value: Any, aval: Any):
        self._trace = trace
        self._line_info = None
        self.aval = aval
        self.value = value

    def dense(self) -> Any:
        """Return the array that the value stands for, in the parent trace."""
        return self._trace.dense(self.value, asked=True)

    def to_concrete_value(self) -> Any:
        """Return the array if all parts of the value are concrete, else None: JAX asks this before it branches."""
        leaves, _ = flatten(self.value)
        if any(isinstance(x, _jax.Tracer) and x.to_concrete_value() is None for x in leaves):
            return None
        if _jax.asked_only_whether():
            return True  # not for the array
        if _jax.asked_for_sharding():
            return None  # its leaves lie where they lie
        try:
            dense = self.dense()
        except MaterializationError:  # whoever asked has another way, or an error of its own
            return None
        return dense.to_concrete_value() if isinstance(dense, _jax.Tracer) else dense

    def __float__(self):
        array = self.to_concrete_value()
        return super().__float__() if array is None else float(array)

    def __complex__(self):
        array = self.to_concrete_value()
        return super().__complex__() if array is None else complex(array)

    def __array__(self, *args: Any, **kwargs: Any):
        array = self.to_concrete_value()
        return super().__array__(*args, **kwargs) if array is None else array.__array__(*args, **kwargs)

    def item(self, *args: Any):
        """As `jax.Array.item`."""
        array = self.to_concrete_value()
        return super().__getattr__("item")(*args) if array is None else array.item(*args)

    def tolist(self):
        """As `jax.Array.tolist`."""
        array = self.to_concrete_value()
        return super().tolist() if array is None else array.tolist()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        try:
            return getattr(self.value, name)
        except AttributeError:
            raise AttributeError(
                f"neither arrays nor `{type(self.value).__name__}` have an attribute {name!r}"
            ) from None

    @property
    def _debug_info(self) -> Any:
        # Only the error of an escaped tracer reads this.
        return _jax.DebugInfo(
            "`morphax.wrap`, and it is used after that call has ended. Return it, or take its value with "
            "`morphax.unwrap(tracer)` before",
            f"a function that holds a `{type(self.value).__name__}`",
            None,
            None,
        )

    def _short_repr(self) -> str:
        return f"{type(self).__name__}<{type(self.value).__name__}, {self.aval.str_short()}>"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


_jax.register_tracer_type(DispatchTracer)
