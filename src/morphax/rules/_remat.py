"""`jax.checkpoint` inside a wrapped function: rules run in the recomputed part too."""

from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._trace import CONSTRUCTS, DispatchTrace, treatment
from ._body import body_over_leaves, flatten_all


@treatment(CONSTRUCTS, _jax.remat_p)
def checkpoint(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the checkpoint over the leaves of its operands; the policy stays the same object."""
    leaves, slots = flatten_all(trace, operands)
    avals = [_jax.typeof(x) for x in leaves]
    body = body_over_leaves(_jax.close_jaxpr(params["jaxpr"]), slots, avals)
    jaxpr, consts = _jax.open_jaxpr(body.jaxpr)
    new = _jax.remat_params(params, jaxpr, len(consts), slots.counts)
    return body.results.build(primitive.bind(*consts, *leaves, **new))
