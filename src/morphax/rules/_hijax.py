"""Primitives that are objects, with rules of their own (hijax): `jnp.nonzero`, `jnp.searchsorted`, `lax.custom_root`."""

from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax
from .._differentiation import has_no_tangent
from .._trace import FALLBACKS, DispatchTrace, treatment
from .._value import flatten, is_value
from ..errors import DifferentiationError, MaterializationError


@treatment(FALLBACKS, _jax.call_hi_primitive_p)
def call_hi_primitive(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Dispatch what the primitive expands to, if a value refuses to become an array and no derivative is lost.

    The expansion may have other derivatives than the primitive (the iterations of a root finder). Integers have none, and
    a primitive with a forward-mode rule keeps it.
    """
    if not _refuses(trace, operands):
        return NotImplemented
    if not any(map(_jax.is_inexact, params["_prim"].out_avals_flat)):
        return trace.call(lambda *args: primitive.to_lojax(*args, **params), operands)
    expanded = _jax.with_its_jvp(primitive, params)
    if expanded is None:
        return NotImplemented
    return trace.call(expanded, [_undifferentiable(x) if has_no_tangent(x) else x for x in operands])


def _undifferentiable(value: Any) -> Any:
    """Return the value with leaves that cannot be differentiated: the primitive's rule wants a tangent of the array."""
    leaves, structure = flatten(value)
    if structure is None:
        return value

    @jax.custom_jvp
    def identity(*leaves: Any):
        return leaves

    @identity.defjvp
    def _jvp(primals: Any, tangents: Any):
        raise DifferentiationError(
            f"a `{structure.type.__name__}` has no tangent here: its `__jax_array__` refuses, and it is not said to be linear "
            "in its leaves. If it is, set `linear = True` on the class."
        )

    return structure.build(identity(*leaves))


def _refuses(trace: DispatchTrace, operands: Sequence[Any]) -> bool:
    try:
        for x in filter(is_value, operands):
            trace.dense(x)
    except MaterializationError:
        return True
    return False
