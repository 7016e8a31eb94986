"""Primitives that leave the data as it is act on each leaf of a value."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Sharding

from .. import _jax
from .._trace import FALLBACKS, DispatchTrace, treatment
from ..primitives import IDENTITIES
from ._body import flatten_all, split


@treatment(FALLBACKS, *IDENTITIES)
def identity(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind the primitive on each leaf; it keeps the value's meaning, whatever that is."""
    leaves, slots = flatten_all(trace, operands)
    if primitive.multiple_results:
        return slots.build(primitive.bind(*leaves, **params))
    return slots.build([primitive.bind(x, **params) for x in leaves])[0]


@treatment(FALLBACKS, _jax.device_put_p)
def device_put(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Move each leaf; a sharding names dimensions of the array, so it moves leaves only if they have its shape."""
    leaves, slots = flatten_all(trace, operands)
    groups = split(leaves, slots.counts)
    alike = [all(jnp.shape(leaf) == jnp.shape(x) for leaf in group) for group, x in zip(groups, operands, strict=True)]
    if not all(a or not isinstance(d, Sharding) for a, d in zip(alike, params["devices"], strict=True)):
        return NotImplemented
    spread = {
        name: tuple(entry for entry, n in zip(entries, slots.counts, strict=True) for _ in range(n))
        for name, entries in params.items()
    }
    return slots.build(primitive.bind(*leaves, **spread))
