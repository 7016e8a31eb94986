"""Sub-programs over leaves: what every higher-order primitive needs.

A jaxpr in a bind's parameters speaks of arrays. Where an operand is a value, the same program is traced again over the
value's leaves, with the dispatch applied inside, and kept: weakly by the jaxpr, and by the structures of the operands, the
types of the leaves and the version of the registry.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _jax
from .._registry import registry
from .._trace import OBSERVER, DispatchTrace, subtrace
from .._value import Structure, flatten, is_value


@dataclass(frozen=True)
class Slots:
    """How a list of operands or results lies in a flat list of leaves: per slot a structure, or None for an array."""

    structures: tuple[Structure | None, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of leaves of each slot."""
        return tuple(1 if s is None else s.num_leaves for s in self.structures)

    @property
    def plain(self) -> bool:
        """Whether no slot is a value."""
        return all(s is None for s in self.structures)

    def build(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the operands or results made of these leaves."""
        rest = iter(leaves)
        return [
            next(rest) if s is None else s.build([next(rest) for _ in range(s.num_leaves)]) for s in self.structures
        ]

    def shaped_alike(self, arrays: Sequence[Any], leaves: Sequence[Any]) -> list[tuple[int, bool]]:
        """Per slot the number of leaves, and whether each leaf has the shape of the slot's array.

        Args:
            arrays: The types of the slots' arrays.
            leaves: The types of all leaves.
        """
        groups = split(leaves, self.counts)
        return [(len(g), all(leaf.shape == a.shape for leaf in g)) for g, a in zip(groups, arrays, strict=True)]


def split(xs: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Cut a list into pieces of these lengths."""
    rest = iter(xs)
    return [[next(rest) for _ in range(n)] for n in counts]


def flatten_all(trace: DispatchTrace, operands: Sequence[Any]) -> tuple[list[Any], Slots]:
    """Return all leaves and how they lie. A value whose type is no pytree becomes an array."""
    leaves: list[Any] = []
    structures: list[Structure | None] = []
    for x in operands:
        parts, structure = flatten(x) if is_value(x) else ([x], None)
        if structure is None and is_value(x):
            parts = [trace.dense(x)]
        leaves += parts
        structures.append(structure)
    return leaves, Slots(tuple(structures))


@dataclass(frozen=True)
class Body:
    """A sub-program over leaves: a closed jaxpr, and how its results lie. Keeps no tracer and not its key."""

    jaxpr: Any
    results: Slots
    callables: dict[Any, Any] = field(default_factory=dict)  # `jax.jit` callables of the program, by their parameters


def body_over_leaves(jaxpr: Any, slots: Slots, avals: Sequence[Any]) -> Body:
    """Return a closed jaxpr as a program over leaves of these types, with the dispatch applied inside."""
    if OBSERVER.get() is not None:  # it is to be told of what a kept program no longer says
        return _retrace(jaxpr, slots, tuple(avals))
    body = _kept(jaxpr, slots, tuple(avals), registry.version)
    # A rule that closed over tracers left them in the constants: such a program belongs to this call alone.
    return _retrace(jaxpr, slots, tuple(avals)) if body is None else body


@_jax.weakref_lru_cache
def _kept(jaxpr: Any, slots: Slots, avals: tuple[Any, ...], version: int) -> Body | None:
    del version
    body = _retrace(jaxpr, slots, avals)
    return None if any(isinstance(c, _jax.Tracer) for c in body.jaxpr.consts) else body


def _retrace(jaxpr: Any, slots: Slots, avals: tuple[Any, ...]) -> Body:
    found: list[Slots] = []

    def over_leaves(*leaves):
        with subtrace() as trace:
            outs, results = flatten_all(trace, trace.call(_jax.eval_jaxpr(jaxpr), slots.build(leaves)))
        found.append(results)
        return outs

    retraced = _jax.trace_jaxpr(over_leaves, avals, _jax.debug_info_of(jaxpr))
    return Body(retraced, found[0])
