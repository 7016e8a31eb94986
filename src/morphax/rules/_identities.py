"""Primitives that leave the data as it is act on each leaf of a value, whatever the value means."""

from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._trace import FALLBACKS, DispatchTrace, treatment
from .._value import aval_of, is_value
from ..primitives import IDENTITIES
from ._body import Slots, flatten_all, split


@treatment(FALLBACKS, *IDENTITIES)
def identity(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind the primitive on each leaf. A value without leaves cannot vary along a mesh axis: there it becomes an array."""
    leaves, slots = flatten_all(trace, operands)
    if primitive is _jax.pvary_p and not leaves:
        return NotImplemented
    if primitive.multiple_results:
        return slots.build(primitive.bind(*leaves, **params))
    return slots.build([primitive.bind(x, **params) for x in leaves])[0]


@treatment(FALLBACKS, _jax.sharding_constraint_p)
def sharding_constraint(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Constrain each leaf, where the sharding can be said of the leaves."""
    leaves, slots = flatten_all(trace, operands)
    if not _fits(params["sharding"], leaves, operands[0]):
        return NotImplemented
    return slots.build([primitive.bind(x, **params) for x in leaves])[0]


@treatment(FALLBACKS, _jax.device_put_p)
def device_put(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Move each leaf, where the destination can be said of the leaves."""
    leaves, slots = flatten_all(trace, operands)
    groups = split(leaves, slots.counts)
    if not all(map(_fits, params["devices"], groups, operands)):
        return NotImplemented
    spread = {name: _per_leaf(entries, slots) for name, entries in params.items()}
    return slots.build(primitive.bind(*leaves, **spread))


def _fits(destination: Any, leaves: Sequence[Any], x: Any) -> bool:
    """Whether a sharding, which names dimensions of the array, holds of the leaves: it names none, or they are the same."""
    if not _jax.names_dimensions(destination) or not is_value(x):
        return True
    return all(_jax.typeof(leaf).shape == aval_of(x).shape for leaf in leaves)


def _per_leaf(entries: Sequence[Any], slots: Slots) -> tuple[Any, ...]:
    return tuple(entry for entry, n in zip(entries, slots.counts, strict=True) for _ in range(n))
