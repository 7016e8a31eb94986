"""What an array-ish value is, and how it becomes an array.

An object is array-ish when its type has `__jax_array__` and is no array itself. A value is a pytree: its arrays are its
*leaves*, and what remains is its *structure*. Wherever an operation meets a raw value, the value becomes an array by binding
one primitive, `value`, on its leaves, with its structure as parameter. A dispatching trace turns that bind back into the
value; anywhere else the primitive means what the author's `__jax_array__` computes.
"""

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from . import _jax
from .errors import AvalError, MaterializationError


class _ValueTypes(dict[type, bool]):
    """Whether instances of a class are array-ish: it has `__jax_array__` and is no array, tracer or scalar."""

    def __missing__(self, cls: type) -> bool:
        known = callable(getattr(cls, "__jax_array__", None)) and not issubclass(cls, (_jax.Tracer, *_jax.ARRAY_TYPES))
        self[cls] = known
        return known


is_value_type: Callable[[type], bool] = _ValueTypes().__getitem__  # asked of every operand and every leaf


def is_value(x: Any) -> bool:
    """Whether ``x`` is array-ish."""
    return is_value_type(type(x))


class Structure(NamedTuple):
    """What a value is apart from its arrays. Hashable, so that traced programs can be kept by it."""

    treedef: Any
    static: tuple[
        tuple[int, Any], ...
    ] = ()  # leaves of the pytree that are no arrays (functions, strings), by position

    @property
    def num_leaves(self) -> int:
        """The number of arrays."""
        return self.treedef.num_leaves - len(self.static)

    @property
    def type(self) -> type:
        """The type of the value."""
        return self.treedef.node_data()[0]

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the value with these arrays."""
        if self.static:
            leaves = list(leaves)
            for position, leaf in self.static:
                leaves.insert(position, leaf)
        return jtu.tree_unflatten(self.treedef, leaves)

    def __repr__(self) -> str:
        return str(self.treedef)


def flatten(value: Any) -> tuple[list[Any], Structure | None]:
    """Return a value's leaves and structure; ``None`` in place of the structure if its type is no pytree."""
    leaves, treedef = jtu.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return leaves, None
    if all(isinstance(leaf, (_jax.Tracer, *_jax.ARRAY_TYPES)) for leaf in leaves):
        return leaves, Structure(treedef)
    arrays, static = [], []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, (_jax.Tracer, *_jax.ARRAY_TYPES, jax.ShapeDtypeStruct)):
            arrays.append(leaf)
        elif is_value(leaf):  # array-ish, but no pytree
            arrays.append(materialize(leaf))
        else:
            static.append((position, leaf))
    return arrays, Structure(treedef, tuple(static))


ABSTRACT: ContextVar[bool] = ContextVar("abstract", default=False)  # whether an author's code is asked for a type


def trace_abstractly(fun: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """Trace an author's code for what it says of a value. Nothing will be computed, and nobody is told of it."""
    token = ABSTRACT.set(True)
    try:
        return _jax.trace_jaxpr(fun, avals)
    finally:
        ABSTRACT.reset(token)


def _author(cls: type) -> Callable[[Any], Any]:
    """The author's own `__jax_array__`, which `register_type` replaced by the lifting one."""
    method = cls.__jax_array__  # type: ignore[attr-defined]
    return getattr(method, "author", method)


def materialize(x: Any, /) -> Any:
    """Return the dense array that ``x`` stands for.

    Runs the author's `__jax_array__` until the result is an array. An array is returned as it is.

    Args:
        x: A value, raw or in a tracer, or an array.

    Returns:
        An array with the shape and dtype of ``x``.

    Raises:
        MaterializationError: If the type refuses, by raising in `__jax_array__`, or if that never arrives at an array.
    """
    while True:
        if is_value(x):
            dense = _ask_author(x)
            if dense is x:
                raise MaterializationError(
                    f"`{type(x).__name__}.__jax_array__` returned the value itself, so it never becomes an array. Return "
                    "an array made of its fields."
                )
            x = dense
        elif isinstance(x, _jax.Tracer):
            held = getattr(type(x), "dense", None)  # a tracer that holds a value keeps its array
            return x if held is None else held(x)
        elif isinstance(x, jax.Array):
            return x
        else:
            return jax.numpy.asarray(x)


def _ask_author(value: Any) -> Any:
    try:
        dense = _author(type(value))(value)
    except MaterializationError:
        raise
    except Exception as error:
        raise MaterializationError(
            f"a `{type(value).__name__}` had to become an array, and its `__jax_array__` raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if dense is None or (not isinstance(dense, (_jax.Tracer, *_jax.ARRAY_TYPES)) and not is_value(dense)):
        raise MaterializationError(
            f"`{type(value).__name__}.__jax_array__` returned a `{type(dense).__name__}`, which is no array. Return an "
            "array made of the value's fields."
        )
    return dense


def holds_value(value: Any) -> bool:
    """Whether a value holds other values, whose rules its `__jax_array__` should meet."""
    return any(is_value(x) for x in jtu.tree_leaves(value, is_leaf=lambda x: x is not value and is_value(x)))


def aval_of(value: Any) -> Any:
    """Return the type (shape, dtype, weak type, sharding) of the array that ``value`` stands for.

    Asks the type's own `aval()`, or else traces `__jax_array__` abstractly, once per structure.

    Raises:
        AvalError: If `aval()` returns anything but the type of an array.
    """
    method = getattr(type(value), "aval", None)
    if method is None or method is traced_aval:
        return traced_aval(value)
    aval = method(value)
    if type(aval) is _jax.ShapedArray:
        return aval
    if isinstance(aval, jax.ShapeDtypeStruct):
        return _jax.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
    raise AvalError(
        f"`{type(value).__name__}.aval()` returned {aval!r}, which is not the type of an array. Return a "
        "`jax.core.ShapedArray(shape, dtype)`, or `jax.typeof(array)`."
    )


def traced_aval(value: Any) -> Any:
    """The default of `aval()`: the type of what `__jax_array__` returns, traced once per structure."""
    leaves, structure = flatten(value)
    if structure is None:
        return trace_abstractly(lambda: [materialize(value)], ()).out_avals[0]
    return dense_jaxpr(structure, tuple(map(_jax.typeof, leaves)), _jax.trace_context()).out_avals[0]


@functools.lru_cache(maxsize=4096)
def dense_jaxpr(structure: Structure, avals: tuple[Any, ...], context: Any) -> Any:
    """The closed jaxpr of `__jax_array__` over a value's leaves."""
    del context  # a key: what tracing depends on
    return trace_abstractly(lambda *leaves: [materialize(structure.build(leaves))], avals)


@functools.lru_cache(maxsize=4096)
def aval_of_structure(structure: Structure, avals: tuple[Any, ...], context: Any) -> Any:
    del context
    found: list[Any] = []

    def ask(*leaves: Any):
        found.append(aval_of(structure.build(leaves)))
        return []

    trace_abstractly(ask, avals)
    return found[0]


value_p = _jax.Primitive("value")


def lift(value: Any) -> Any:
    """Make an array of a raw value: a tracer that dispatches if the current trace does, else its dense array."""
    lifted = getattr(_jax.current_trace(), "lift_value", None)
    if lifted is not None:
        return lifted(value)
    leaves, structure = flatten(value)
    if structure is None:
        return materialize(value)
    return value_p.bind(*leaves, structure=structure)


def dense_of_leaves(*leaves: Any, structure: Structure) -> Any:
    return materialize(structure.build(leaves))


def _abstract(*avals: Any, structure: Structure) -> Any:
    return aval_of_structure(structure, avals, _jax.trace_context())


value_p.def_impl(dense_of_leaves)
value_p.def_abstract_eval(_abstract)
_jax.register_lowering(value_p, _jax.lower_fun(dense_of_leaves, multiple_results=False))
