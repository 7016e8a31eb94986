"""What a value shares with `jax.Array` in use: operators, methods, indexing and conversions.

Each is one call of the `jax.numpy` function or the array method of that name, made through the dispatch, so that
``length * 2`` is a length outside `wrap` as well as inside. How such a call is made belongs to a higher layer, which
announces itself with `dispatch_with`.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

_call: Callable[..., Any]


def dispatch_with(call: Callable[..., Any]) -> None:
    """Make ``call(function, *args, **kwargs)`` the way in which operators and methods of values run."""
    global _call
    _call = call


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def operate(self: Any):
        return _call(function, self)

    return operate


def _binary(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def operate(self: Any, other: Any):
        # What no array accepts gets its own turn, or Python's error with both types. (A NamedTuple may be array-ish.)
        no_array = other is None or isinstance(other, (str, bytes, list, tuple, dict, set))
        if no_array and not hasattr(type(other), "__jax_array__"):
            return NotImplemented
        return _call(function, other, self) if reflected else _call(function, self, other)

    return operate


def _method(name: str) -> Callable[..., Any]:
    def call(array: Any, *args: Any, **kwargs: Any):
        return getattr(array, name)(*args, **kwargs)

    def method(self: Any, *args: Any, **kwargs: Any):
        return _call(call, self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"As `jax.Array.{name}`."
    return method


def _property(name: str) -> property:
    return property(lambda self: _call(operator.attrgetter(name), self), doc=f"As `jax.Array.{name}`.")


class _IndexUpdate:
    """``value.at[index]``, whose methods give the updated array."""

    __slots__ = ("_index", "_value")

    def __init__(self, value: Any, index: Any):
        self._value, self._index = value, index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        index = self._index

        def update(*args: Any, **kwargs: Any):
            return _call(
                lambda array, *xs, **kw: getattr(array.at[index], name)(*xs, **kw), self._value, *args, **kwargs
            )

        return update


class _At:
    """``value.at``, to be indexed."""

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        self._value = value

    def __getitem__(self, index: Any) -> _IndexUpdate:
        return _IndexUpdate(self._value, index)


class Operators:
    """The part of `jax.Array`'s interface that is made of operations.

    Reflected operators are here too: `numpy.ndarray` gives way by `__array_priority__`, `jax.Array` because a value does
    not turn into an array for it.
    """

    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # like an array: it compares elementwise

    __neg__, __pos__, __abs__, __invert__ = map(_unary, (jnp.negative, jnp.positive, jnp.abs, jnp.invert))
    __add__, __radd__ = _binary(jnp.add), _binary(jnp.add, reflected=True)
    __sub__, __rsub__ = _binary(jnp.subtract), _binary(jnp.subtract, reflected=True)
    __mul__, __rmul__ = _binary(jnp.multiply), _binary(jnp.multiply, reflected=True)
    __truediv__, __rtruediv__ = _binary(jnp.true_divide), _binary(jnp.true_divide, reflected=True)
    __floordiv__, __rfloordiv__ = _binary(jnp.floor_divide), _binary(jnp.floor_divide, reflected=True)
    __mod__, __rmod__ = _binary(jnp.remainder), _binary(jnp.remainder, reflected=True)
    __divmod__, __rdivmod__ = _binary(jnp.divmod), _binary(jnp.divmod, reflected=True)
    __pow__, __rpow__ = _binary(operator.pow), _binary(operator.pow, reflected=True)
    __matmul__, __rmatmul__ = _binary(jnp.matmul), _binary(jnp.matmul, reflected=True)
    __and__, __rand__ = _binary(jnp.bitwise_and), _binary(jnp.bitwise_and, reflected=True)
    __or__, __ror__ = _binary(jnp.bitwise_or), _binary(jnp.bitwise_or, reflected=True)
    __xor__, __rxor__ = _binary(jnp.bitwise_xor), _binary(jnp.bitwise_xor, reflected=True)
    __lshift__, __rlshift__ = _binary(jnp.left_shift), _binary(jnp.left_shift, reflected=True)
    __rshift__, __rrshift__ = _binary(jnp.right_shift), _binary(jnp.right_shift, reflected=True)
    __eq__, __ne__ = _binary(jnp.equal), _binary(jnp.not_equal)  # type: ignore[assignment]
    __lt__, __le__ = _binary(jnp.less), _binary(jnp.less_equal)
    __gt__, __ge__ = _binary(jnp.greater), _binary(jnp.greater_equal)

    all, any, argmax, argmin, argsort = map(_method, ("all", "any", "argmax", "argmin", "argsort"))
    astype, choose, clip, compress, conj = map(_method, ("astype", "choose", "clip", "compress", "conj"))
    conjugate, copy, cumprod, cumsum = map(_method, ("conjugate", "copy", "cumprod", "cumsum"))
    diagonal, dot, flatten, max, mean, min = map(_method, ("diagonal", "dot", "flatten", "max", "mean", "min"))
    nonzero, prod, ptp, ravel, repeat = map(_method, ("nonzero", "prod", "ptp", "ravel", "repeat"))
    reshape, round, searchsorted, sort = map(_method, ("reshape", "round", "searchsorted", "sort"))
    squeeze, std, sum, swapaxes, take = map(_method, ("squeeze", "std", "sum", "swapaxes", "take"))
    trace, transpose, var, view = map(_method, ("trace", "transpose", "var", "view"))
    T, mT, real, imag = map(_property, ("T", "mT", "real", "imag"))
    at = property(_At, doc="As `jax.Array.at`: ``value.at[index].set(x)`` gives an updated array or value.")

    def __getitem__(self, index: Any):
        return _call(operator.getitem, self, index)

    def __len__(self) -> int:
        if not self.ndim:  # type: ignore[attr-defined]
            raise TypeError("len() of a value without dimensions")
        return self.shape[0]  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __array_namespace__(self, *, api_version: str | None = None):
        return jnp

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.__jax_array__(), dtype=dtype)  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.__jax_array__())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.__jax_array__())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.__jax_array__())  # type: ignore[attr-defined]

    def __index__(self) -> int:
        return operator.index(self.__jax_array__())  # type: ignore[attr-defined]

    def item(self, *args: Any):
        """As `jax.Array.item`."""
        return self.__jax_array__().item(*args)  # type: ignore[attr-defined]

    def tolist(self):
        """As `jax.Array.tolist`."""
        return self.__jax_array__().tolist()  # type: ignore[attr-defined]
