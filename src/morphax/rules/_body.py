"""Sub-programs over leaves: what every higher-order primitive needs.

A jaxpr in a bind's parameters speaks of arrays. Where an operand is a value, the same program is traced again over the
value's leaves, with the dispatch applied inside, and kept: weakly by the jaxpr, and by the structures of the operands, the
types of the leaves and the version of the registry.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._events import OBSERVERS, Collector, Event, observing, tell
from .._registry import registry
from .._trace import DispatchTrace, subtrace
from .._value import Structure, flatten, is_value
from ..errors import MaterializationError, StructureError


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

    def extended(self, n: int) -> "Slots":
        """Return these slots followed by n arrays."""
        return Slots((*self.structures, *[None] * n))

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


class Seed(NamedTuple):
    """A value among the inputs of a sub-program: an operand, or one that the program captured and that arrives as leaves.

    Attributes:
        structure: Its structure.
        positions: Where its leaves are among the leaves of all operands.
    """

    structure: Structure
    positions: tuple[int, ...]


class Plan(NamedTuple):
    """What a sub-program over leaves depends on, besides the jaxpr, the types of the leaves and the rules.

    Attributes:
        slots: How the operands lie.
        dense: The results that have to be arrays.
        seeded: The values whose dense arrays come in beside them, as leading inputs, so that the body need not compute them.
        around: Called with the body's function and its operands; by default the function is applied to the operands.
    """

    slots: Slots
    dense: frozenset[int] = frozenset()
    seeded: tuple[Seed, ...] = ()
    around: Callable[[Callable[..., Any], list[Any]], list[Any]] | None = None


@dataclass(frozen=True)
class Body:
    """A sub-program over leaves. It keeps neither a tracer nor the jaxpr that it was made from.

    Attributes:
        jaxpr: The closed jaxpr.
        results: How its results lie.
        materialized: The values that it makes dense, though they could be before it.
        events: What was dispatched in it, if anybody observed.
    """

    jaxpr: Any
    results: Slots
    materialized: tuple[Seed, ...]
    events: tuple[Event, ...]

    def used(self) -> "Body":
        """Tell observers of what is dispatched in the program, which is the one that will be bound."""
        for event in self.events:
            tell(event)
        return self

    def hoisted(self) -> tuple[list[Any], Any]:
        """Return the program's constants, and the program with them as leading inputs."""
        if not self.jaxpr.consts:
            return [], self.jaxpr
        jaxpr, consts = _jax.open_jaxpr(self.jaxpr)
        return consts, _jax.close_jaxpr(jaxpr)


def body_over_leaves(jaxpr: Any, plan: Plan, avals: Sequence[Any]) -> Body:
    """Return a closed jaxpr as a program over leaves of these types, with the dispatch applied inside."""
    observers = OBSERVERS.get()
    if any(observer.sees_numbers for observer in observers):
        return _retrace(jaxpr, plan, tuple(avals))
    body = _kept(jaxpr, plan, tuple(avals), registry.version, bool(observers))
    # A rule that closed over tracers left them in the constants: such a program belongs to this call alone.
    return _retrace(jaxpr, plan, tuple(avals)) if body is None else body


@_jax.weakref_lru_cache
def _kept(jaxpr: Any, plan: Plan, avals: tuple[Any, ...], version: int, observed: bool) -> Body | None:
    del version, observed  # keys: one that is observed knows its events
    body = _retrace(jaxpr, plan, avals)
    return None if any(isinstance(c, _jax.Tracer) for c in body.jaxpr.consts) else body


def size_of_cache() -> int:
    """The number of programs that are kept."""
    return _kept.cache_info().currsize


def _retrace(jaxpr: Any, plan: Plan, avals: tuple[Any, ...]) -> Body:
    found: list[tuple[Slots, tuple[Seed, ...]]] = []
    fun = _jax.eval_jaxpr(jaxpr)
    if plan.around is not None:
        fun = _around(plan.around, fun)

    def over_leaves(*leaves: Any):
        seeds, leaves = leaves[: len(plan.seeded)], leaves[len(plan.seeded) :]
        with subtrace() as trace:
            groups = zip(plan.slots.structures, split(leaves, plan.slots.counts), strict=True)
            operands = [x[0] if s is None else trace.rebuild(s, x) for s, x in groups]
            for seed, array in zip(plan.seeded, seeds, strict=True):
                trace.seed(trace.rebuild(seed.structure, [leaves[i] for i in seed.positions]), array)
            outs = trace.call(fun, operands)
            outs = [trace.dense(x) if i in plan.dense and is_value(x) else x for i, x in enumerate(outs)]
            flat, results = flatten_all(trace, outs)
            found.append((results, _materialized(trace, leaves)))
        return flat

    observers = OBSERVERS.get()
    collector = Collector(observers)
    with observing(collector, alone=True) if observers else nullcontext():
        retraced = _jax.trace_jaxpr(over_leaves, avals, _jax.debug_info_of(jaxpr))
    return Body(retraced, *found[0], tuple(collector.events))


def _materialized(trace: DispatchTrace, leaves: Sequence[Any]) -> tuple[Seed, ...]:
    """The values that were made dense and consist of the program's inputs."""
    position = {id(x): i for i, x in enumerate(leaves)}
    return tuple(
        Seed(structure, tuple(position[id(x)] for x in parts))
        for structure, parts in trace.materialized()
        if all(id(x) in position for x in parts)
    )


def _around(around: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: around(fun, list(operands))


def seeded(
    trace: DispatchTrace, jaxpr: Any, plan: Plan, body: Body, operands: Sequence[Any], num_fixed: int
) -> tuple[Body, list[Any]]:
    """Make dense beforehand what a sub-program would make dense itself, of what its first ``num_fixed`` operands hold.

    Returns:
        The program that takes these arrays as leading inputs, and the arrays.
    """
    leaves, slots = flatten_all(trace, operands)
    fixed = sum(slots.counts[:num_fixed])
    seeds = tuple(seed for seed in body.materialized if all(i < fixed for i in seed.positions))
    if not seeds:
        return body, []
    positions = split(range(len(leaves)), slots.counts)
    given = {(s, tuple(group)): x for s, group, x in zip(slots.structures, positions, operands, strict=True)}
    arrays = [
        trace.dense(
            given[seed] if seed in given else trace.rebuild(seed.structure, [leaves[i] for i in seed.positions])
        )
        for seed in seeds
    ]
    avals = body.jaxpr.in_avals
    return body_over_leaves(jaxpr, plan._replace(seeded=seeds), [*map(_jax.typeof, arrays), *avals]), arrays


class Settled(NamedTuple):
    """A loop body whose carry comes out as it went in."""

    body: Body
    seeds: list[Any]  # arrays that it takes before all other operands
    operands: list[Any]


def settle(
    trace: DispatchTrace,
    construct: Any,
    jaxpr: Any,
    operands: Sequence[Any],
    carry: range,
    consts: range,
    types_of: Callable[[Sequence[Any], Slots], list[Any]],
    around: Any = None,
    must_be_dense: Callable[[Body], frozenset[int]] = lambda _: frozenset(),
) -> Settled:
    """Find the form in which a loop's carry enters and leaves its body alike.

    A slot whose structure or leaves change is made dense, on the way in, in the body and on the way out; the others stay.
    An array that becomes a value whose type can be made of an array (`from_array`) enters as such a value.
    Each pass settles at least one slot. Constants that the body makes dense are made dense once, before the loop.

    Args:
        trace: The trace in which the construct was met.
        construct: Its name, for errors.
        jaxpr: The closed body. Its first results are the carry.
        operands: Its operands.
        carry: The positions of the carry among them.
        consts: The positions of what does not change from one iteration to the next: the first operands.
        types_of: Gives the types of the body's leaves, from the leaves and slots of the operands.
        around: See `Plan`.
        must_be_dense: Gives the results that have to be arrays for another reason.
    """
    operands, dense = list(operands), frozenset()
    while True:
        leaves, slots = flatten_all(trace, operands)
        avals = types_of(leaves, slots)
        plan = Plan(slots, dense, (), around)
        body = _settling(trace, construct, jaxpr, plan, avals)
        clashes = _clashes(body, slots, avals, carry) - dense
        if _adopt(body, operands, carry, clashes):
            continue
        wanted = dense | clashes | must_be_dense(body)
        if wanted == dense:
            break
        for i in clashes:
            x = operands[carry[i]]
            if is_value(x):
                operands[carry[i]] = _dense_slot(trace, construct, i, x, body.results.structures[i])
        dense = wanted
    body, seeds = seeded(trace, jaxpr, plan, body, operands, len(consts))
    return Settled(body.used(), seeds, operands)


def _settling(trace: DispatchTrace, construct: Any, jaxpr: Any, plan: Plan, avals: Sequence[Any]) -> Body:
    try:
        return body_over_leaves(jaxpr, plan, avals)
    except MaterializationError as error:
        if not plan.dense:
            raise
        raise StructureError(
            f"a result of the body of `{construct}` has to be an array, since it does not leave the body as it entered it, "
            f"and it refuses: {error}\nAt {_jax.user_line()}."
        ) from error


def _clashes(body: Body, slots: Slots, avals: Sequence[Any], carry: range) -> frozenset[int]:
    """The carry slots that leave the body in another form than they entered it."""
    entered = split(avals, slots.counts)
    left = split(body.jaxpr.out_avals, body.results.counts)
    return frozenset(
        i
        for i, position in enumerate(carry)
        if slots.structures[position] != body.results.structures[i]
        or (slots.structures[position] is not None and not all(map(_jax.same_type, entered[position], left[i])))
    )


def _adopt(body: Body, operands: list[Any], carry: range, clashes: frozenset[int]) -> bool:
    """Turn arrays that leave the body as values into such values, where the type knows how. Say whether any was."""
    groups = split(body.jaxpr.out_avals, body.results.counts)
    adopted = False
    for i in clashes:
        structure, x = body.results.structures[i], operands[carry[i]]
        make = getattr(structure.type, "from_array", None) if structure is not None and not is_value(x) else None
        if make is not None and structure is not None:
            like = structure.build([jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in groups[i]])
            operands[carry[i]] = make(x, like)
            adopted = True
    return adopted


def _dense_slot(trace: DispatchTrace, construct: Any, i: int, x: Any, left: Structure | None) -> Any:
    try:
        return trace.dense(x)
    except MaterializationError as error:
        entered = flatten(x)[1]
        raise StructureError(
            f"the carry changed structure: slot {i} of `{construct}` enters the body as {entered} and leaves it as "
            f"{'an array' if left is None else left}, and cannot be made an array to agree: {error}\n"
            f"At {_jax.user_line()}.\nLet the body return the value as it got it."
        ) from error
