"""Quax's names over Morphax, so that code written for Quax runs by changing one import.

from morphax.compat import quax

class Length(quax.ArrayValue):
    metres: Array
    def aval(self): return jax.typeof(self.metres)
    def materialise(self): return self.metres

quax.quaxify(f)(Length(x))
"""

import abc
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx

from .._array_value import Shaped, register_type
from .._operators import Operators
from .._registry import registry
from .._trace import CONSTRUCTS
from .._traits import derive, map_leaves
from .._value import is_value, materialize
from .._wrap import dispatch, wrap

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


class Value(Operators, eqx.Module):
    """Base of array-ish types: an `equinox.Module` with `aval` and `materialise`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_type(cls)

    # Two of them are compared as the trees that they are, and can be keys.
    __eq__, __hash__ = eqx.Module.__eq__, eqx.Module.__hash__
    __ne__ = object.__ne__

    @abc.abstractmethod
    def aval(self) -> Any:
        """Return the type of what the value stands for."""

    @abc.abstractmethod
    def materialise(self) -> Any:
        """Return the array that the value stands for, or raise."""

    def __jax_array__(self) -> Any:
        return self.materialise()

    @staticmethod
    def default(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Materialize all values and bind the primitive. A type may override what is done where it has no rule."""
        return primitive.bind(*(materialize(x) if is_value(x) else x for x in values), **params)

    default.__func__.is_no_override = True  # pyright: ignore[reportFunctionMemberAccess]  # so the dispatch does by itself what this would do


class ArrayValue(Shaped, Value):
    """A `Value` that stands for an array."""


class _Filtered(eqx.Module):
    """A function of which only some arguments are made to dispatch."""

    fn: Callable[..., Any]
    filter_spec: Any

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        dynamic, static = eqx.partition((self.fn, args, kwargs), self.filter_spec, is_leaf=is_value)

        def call(dynamic: Any):
            fn, args, kwargs = eqx.combine(dynamic, static, is_leaf=is_value)
            return fn(*args, **kwargs)

        return dispatch(call, (dynamic,), {})


def quaxify(fn: T, /, filter_spec: Any = True) -> T:
    """Make a function dispatch on values: `morphax.wrap`.

    Args:
        fn: Any callable.
        filter_spec: Which of ``(fn, args, kwargs)`` dispatch, as in `equinox.partition`; the rest is passed as it is.
    """
    if filter_spec is True:
        return wrap(fn)  # type: ignore[return-value]
    return eqx.module_update_wrapper(_Filtered(fn, filter_spec))  # type: ignore[return-value]


def _names_value(rule: Callable[..., Any]) -> bool:
    parameters = inspect.signature(rule).parameters.values()
    return any(p.annotation not in (p.empty, Any) for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))


def register(primitive: Any, /, *, precedence: int = 0) -> Callable[[T], T]:
    """Register a rule: `morphax.register`, which here also takes rules on arrays alone."""

    def decorate(rule: T) -> T:
        if primitive in CONSTRUCTS and not _names_value(rule):
            return rule  # the built-in treatment is for values, and so more specific than a rule for anything
        names = sys._getframe(1).f_locals
        registry.add([primitive], rule, precedence=precedence, override=False, plain=None, names=names)
        return rule

    return decorate


def register_structural(cls: C) -> C:
    """Register rules for all primitives that move elements: they act on each leaf, and every leaf has the array's shape.

    `morphax.derive` with ``map_parts = morphax.map_leaves``, unless the class has a `map_parts` of its own. Use it as a decorator.
    """
    if not hasattr(cls, "map_parts"):
        cls.map_parts = map_leaves  # type: ignore[attr-defined]
    return derive(cls)
