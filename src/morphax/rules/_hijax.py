"""Primitives that are objects, with rules of their own (hijax): `jnp.nonzero`, `jnp.searchsorted`, `lax.custom_root`."""

from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._trace import FALLBACKS, DispatchTrace, treatment
from .._value import is_value
from ..errors import MaterializationError


@treatment(FALLBACKS, _jax.call_hi_primitive_p)
def call_hi_primitive(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Dispatch what the primitive expands to, if a value refuses to become an array and no derivative could be lost.

    The expansion may have other derivatives than the primitive (the iterations of a root finder). Integers have none.
    """
    if not _refuses(trace, operands) or any(map(_jax.is_inexact, params["_prim"].out_avals_flat)):
        return NotImplemented
    return trace.call(lambda *args: primitive.to_lojax(*args, **params), operands)


def _refuses(trace: DispatchTrace, operands: Sequence[Any]) -> bool:
    try:
        for x in filter(is_value, operands):
            trace.dense(x)
    except MaterializationError:
        return True
    return False
