"""Primitives that are tried as the simpler ones that they stand for, when those have rules and these do not."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from .. import _jax
from .._registry import registry
from .._trace import FALLBACKS, DispatchTrace, treatment
from .._value import aval_of, is_value

Call = Callable[..., Any]


def decomposition(*primitives: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how primitives may be expressed: ``f(operands, **params)`` gives the call to make in their place, or None."""

    def decorate(express: Callable[..., Any]) -> Callable[..., Any]:
        @treatment(FALLBACKS, *primitives)
        def simpler(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
            call = express(operands, **params)
            if call is None:
                return NotImplemented
            with _jax.set_current_trace(trace):
                return call(*operands)

        return express

    return decorate


def _has_rule(primitive: Any, operands: Sequence[Any]) -> bool:
    return registry.find(primitive, operands) is not None


@decomposition(_jax.add_jaxvals_p)
def add_cotangents(operands: Sequence[Any], **params: Any) -> Call | None:
    """Cotangents are added as arrays are."""
    return lax.add if _has_rule(lax.add_p, operands) else None


@decomposition(lax.convert_element_type_p)
def convert_to_own_dtype(operands: Sequence[Any], **params: Any) -> Call | None:
    """A conversion that changes nothing is the value itself."""
    (x,) = operands
    aval = aval_of(x)
    same = aval.dtype == params["new_dtype"] and aval.weak_type == params["weak_type"] and params["sharding"] is None
    return (lambda x: x) if same else None


@decomposition(lax.square_p)
def square_as_product(operands: Sequence[Any], **params: Any) -> Call | None:
    """``x ** 2`` is ``x * x``."""
    return (lambda x: lax.mul(x, x)) if _has_rule(lax.mul_p, [*operands, *operands]) else None


@decomposition(lax.integer_pow_p)
def integer_power_as_product(operands: Sequence[Any], **params: Any) -> Call | None:
    """The second and third power are products."""
    if params["y"] not in (2, 3) or not _has_rule(lax.mul_p, [*operands, *operands]):
        return None
    return (lambda x: lax.mul(x, x)) if params["y"] == 2 else (lambda x: lax.mul(lax.mul(x, x), x))


@decomposition(lax.split_p)
def split_as_slices(operands: Sequence[Any], **params: Any) -> Call | None:
    """The pieces are slices."""
    if not _has_rule(lax.slice_p, operands):
        return None
    sizes, axis = params["sizes"], params["axis"]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return lambda x: [lax.slice_in_dim(x, start, start + n, axis=axis) for start, n in zip(starts, sizes, strict=True)]


@decomposition(_jax.stack_p)
def stack_as_concatenation(operands: Sequence[Any], **params: Any) -> Call | None:
    """A stack is the concatenation of arrays with a new axis."""
    if not _has_rule(lax.concatenate_p, operands) or not any(map(is_value, operands)):
        return None
    axis = params["axis"]
    return lambda *xs: lax.concatenate([lax.expand_dims(x, (axis,)) for x in xs], axis)
