"""Rules for whole families from a few hooks of a type: `derive`.

    @mx.derive
    class Length(mx.ArrayValue):
        linear = True
        metres: Array
        map_parts = mx.map_leaves              # its array is its part

The hooks say what a type can do, and each gives the rules that follow from it:

* ``map_parts(self, f)``: all that moves elements: transpose, reshape, indexing, concatenation, selection. If the type also says
  ``linear = True``, all that is linear in the elements too: sums, negation, products with plain arrays, contractions.
* ``scale_by(self, y)``: products with a plain array, quotients by one, negation.
* ``add_to(self, other)``: sums of two such values; differences, if the type can also be scaled.
* ``contract_with(self, y, dimension_numbers, **params)``: `dot_general` with a plain array on either side.

A hook may return `NotImplemented`, as a rule may. Any rule that is registered for the type goes before the derived one.
"""

import abc
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax

from . import _jax
from ._array_value import register_type
from ._parts import map_leaves as map_leaves
from ._partwise import MOVES, elements_of, keeps_numbers, partwise
from ._registry import registry
from ._value import aval_of, is_value
from .errors import RegistrationError
from .primitives import is_neutral

T = TypeVar("T", bound=type)

_LAST = (
    -1_000_000
)  # the precedence of derived rules: a rule that an author wrote wins wherever neither is more specific


_REDUCING = (lax.cumsum_p, lax.neg_p, lax.reduce_sum_p, lax.reduce_window_sum_p)
_ADDING = (lax.add_p, lax.scatter_add_p, lax.sub_p)
_SCALING = (lax.div_p, lax.mul_p)
_CONTRACTING = (lax.conv_general_dilated_p, lax.dot_general_p)


def derive(cls: T) -> T:
    """Register the rules that follow from a type's hooks: `map_parts`, `scale_by`, `add_to`, `contract_with`.

    Use it as the decorator of a class. What a derived rule does not cover goes on as without it. A subclass has the rules too.

    * ``map_parts(self, f)`` returns the value with ``f(part)`` in place of each part. Every part has the array's shape, and an
      element of the array depends on the same element of each part. With ``linear = True`` the array is linear in its parts, by
      the same coefficients at each element. Values of several operands go together if they differ in their parts only, and
      with an array if the type has `from_array`.
    * ``scale_by(self, y)`` returns ``self * y``, linear in ``y``, which is a scalar or has the array's number of dimensions.
    * ``add_to(self, other)`` returns ``self + other``, two values of the type and of one shape.
    * ``contract_with(self, y, dimension_numbers, **params)`` returns `jax.lax.dot_general` of the value and ``y``.

    Args:
        cls: An array-ish class.

    Returns:
        The class.

    Raises:
        RegistrationError: If the class has none of the hooks, or is not array-ish.
    """
    register_type(cls)
    hooks = [name for name in _FAMILIES if callable(getattr(cls, name, None))]
    if not hooks:
        raise RegistrationError(
            f"`derive` found none of its hooks in `{cls.__name__}`: {', '.join(f'`{name}`' for name in _FAMILIES)}. Define "
            "one, or write `map_parts = morphax.map_leaves` if each of its arrays has the shape of the whole."
        )
    for name in hooks:
        for primitives, rule in _FAMILIES[name](cls):
            _register(cls, name, primitives, rule)
    return cls


def _register(cls: type, hook: str, primitives: Sequence[Any], rule: Callable[..., Any]) -> None:
    """Register a rule on values of a class and arrays; it passes for the hook when Morphax names it."""

    def derived(*operands: Any, primitive: Any, **params: Any):
        return rule(primitive, operands, params)

    signature = inspect.signature(derived)
    operands, *rest = signature.parameters.values()
    derived.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[operands.replace(annotation=_operand_of(cls)), *rest]
    )
    derived.__wrapped__ = getattr(cls, hook)  # type: ignore[attr-defined]
    derived.__qualname__ = f"{cls.__qualname__}.{hook}"
    precedence = _LAST + len(cls.__mro__)  # a subclass that derives anew goes before its bases
    registry.add(primitives, derived, precedence=precedence, override=True, plain=False, names=None)


@functools.cache
def _operand_of(cls: type) -> type:
    """What stands for a value of a class or an array in a derived rule's signature, which is so nobody else's.

    No union: plum compares unions by their text, which two classes of one name share.
    """
    operand: Any = abc.ABCMeta(f"{cls.__name__} | ArrayLike", (), {})
    for admitted in (cls, _jax.Tracer, *_jax.ARRAY_TYPES):
        operand.register(admitted)
    return operand


def _from_parts(cls: type) -> list[tuple[Sequence[Any], Callable[..., Any]]]:
    families: list[tuple[Sequence[Any], Callable[..., Any]]] = [(MOVES, _move)]
    if getattr(cls, "linear", None) is True:
        families += [(_REDUCING, _combine), (_ADDING, _combine), ([lax.convert_element_type_p], _convert)]
        families += [(_SCALING, _multiply), (_CONTRACTING, _multiply)]
    return families


def _mapping(x: Any, f: Callable[[Any], Any]) -> Any:
    return x.map_parts(f)


def _move(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    return partwise(primitive, operands, params, _mapping, elements_of(primitive, operands))


def _combine(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    return partwise(primitive, operands, params, _mapping, elements_of(primitive, operands), computes=True)


def _convert(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    if not keeps_numbers(aval_of(operands[0]).dtype, params["new_dtype"]):
        return NotImplemented
    return _combine(primitive, operands, params)


def _multiply(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Products are linear in the one operand that is a value; a quotient is, in the first, if it is not rounded."""
    values = [i for i, x in enumerate(operands) if is_value(x)]
    if len(values) != 1 or (primitive is lax.div_p and not _is_divisible(operands)):
        return NotImplemented
    return partwise(primitive, operands, params, _mapping, values, computes=True)


def _is_divisible(operands: Sequence[Any]) -> bool:
    return is_value(operands[0]) and jnp.issubdtype(aval_of(operands[0]).dtype, jnp.inexact)


def _from_scale(cls: type) -> list[tuple[Sequence[Any], Callable[..., Any]]]:
    return [([*_SCALING, lax.neg_p], _scale)]


def _scale(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    if not _are_neutral(params, operands):
        return NotImplemented
    if primitive is lax.neg_p:
        return operands[0].scale_by(-1)
    x, y = operands
    if is_value(x) and is_value(y):
        return NotImplemented
    if primitive is lax.mul_p:
        return x.scale_by(y) if is_value(x) else y.scale_by(x)
    return x.scale_by(lax.reciprocal(jnp.asarray(y))) if _is_divisible(operands) else NotImplemented


def _from_add(cls: type) -> list[tuple[Sequence[Any], Callable[..., Any]]]:
    return [([lax.add_p, lax.sub_p] if callable(getattr(cls, "scale_by", None)) else [lax.add_p], _add)]


def _add(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    x, y = operands
    alike = is_value(x) and is_value(y) and aval_of(x).shape == aval_of(y).shape
    if not alike or not _are_neutral(params, operands):
        return NotImplemented
    if primitive is lax.sub_p:
        y = y.scale_by(-1)
    return NotImplemented if y is NotImplemented else x.add_to(y)


def _from_contract(cls: type) -> list[tuple[Sequence[Any], Callable[..., Any]]]:
    return [([lax.dot_general_p], _contract)]


def _contract(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    x, y = operands
    if is_value(x):
        return NotImplemented if is_value(y) else x.contract_with(y, **params)
    (xc, yc), (xb, yb) = params["dimension_numbers"]
    if params.get("out_sharding") is not None:  # it speaks of another order of axes
        return NotImplemented
    out = y.contract_with(x, **{**params, "dimension_numbers": ((yc, xc), (yb, xb))})
    return (
        out
        if out is NotImplemented
        else _with_free_axes_swapped(out, len(yb), len(aval_of(y).shape) - len(yb) - len(yc))
    )


def _with_free_axes_swapped(x: Any, num_batch: int, num_first: int) -> Any:
    """Put the first free axes of a contraction after its last ones."""
    batch, free = range(num_batch), range(num_batch, jnp.ndim(x))
    order = (*batch, *free[num_first:], *free[:num_first])
    return x if order == (*batch, *free) else lax.transpose(x, order)


def _are_neutral(params: dict[str, Any], operands: Sequence[Any]) -> bool:
    return all(is_neutral(name, x, operands) for name, x in params.items())


_FAMILIES: dict[str, Callable[[type], list[tuple[Sequence[Any], Callable[..., Any]]]]] = {
    "map_parts": _from_parts,
    "scale_by": _from_scale,
    "add_to": _from_add,
    "contract_with": _from_contract,
}
