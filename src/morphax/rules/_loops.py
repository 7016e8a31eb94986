"""`scan` and `while_loop` inside a wrapped function."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._differentiation import is_leafwise, stacks
from .._registry import registry
from .._trace import CONSTRUCTS, DispatchTrace, treatment
from .._value import Structure, flatten, is_value
from ._body import Body, Plan, Slots, body_over_leaves, flatten_all, seeded, settle, split


class _Slicing(NamedTuple):
    """Gives a scan's body the slices of values that come in whole: ``positions`` among the constants, for the last xs.

    The body is called with ``(*consts, *wholes, *carry, i, *xs)``.
    """

    num_consts: int
    num_carry: int
    positions: tuple[int, ...]  # of the sliced operands among all xs

    def __call__(self, fun: Callable[..., Any], operands: list[Any]) -> list[Any]:
        n, k = self.num_consts, len(self.positions)
        consts, wholes, rest = operands[:n], operands[n : n + k], operands[n + k :]
        carry, i, xs = rest[: self.num_carry], rest[self.num_carry], rest[self.num_carry + 1 :]
        for position, whole in zip(self.positions, wholes, strict=True):
            xs.insert(position, _slice(whole, i))
        return fun(*consts, *carry, *xs)


def _slice(whole: Any, i: Any) -> Any:
    take = getattr(type(getattr(whole, "value", whole)), "take_leading", None)
    return lax.dynamic_index_in_dim(whole, i, keepdims=False) if take is None else take(whole.value, i)


def _slices_by_leaf(x: Any) -> bool:
    """Whether the slices of a value's leaves are its slices."""
    leaves, structure = flatten(x)
    avals = [_jax.typeof(leaf) for leaf in leaves]
    if structure is None or not avals or any(not a.shape or a.shape[0] != avals[0].shape[0] for a in avals):
        return False
    return stacks(structure, tuple(map(_jax.unstacked_aval, avals)), avals[0].shape[0])


def _slices_by_rule(x: Any) -> bool:
    """Whether the type can slice itself: by its hook, or by a rule for `dynamic_slice`."""
    index = [jnp.int32(0)] * len(_shape(x))
    return hasattr(type(x), "take_leading") or registry.find(lax.dynamic_slice_p, [x, *index]) is not None


def _shape(x: Any) -> tuple[int, ...]:
    return jnp.shape(x)


@treatment(CONSTRUCTS, _jax.scan_p)
def scan(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the scan over leaves. A value is scanned along its array's leading axis, by leaf only where that is the same."""
    length = params["length"]
    num_consts, num_carry = _jax.scan_sizes(params, len(operands))
    consts, carry = list(operands[:num_consts]), list(operands[num_consts : num_consts + num_carry])
    xs = list(operands[num_consts + num_carry :])
    sliced = tuple(
        i for i, x in enumerate(xs) if is_value(x) and not _slices_by_leaf(x) and length and _slices_by_rule(x)
    )
    wholes = [xs[i] for i in sliced]
    xs = [trace.dense(x) if is_value(x) and not _slices_by_leaf(x) else x for i, x in enumerate(xs) if i not in sliced]
    around = _Slicing(num_consts, num_carry, sliced) if sliced else None
    if sliced:
        xs = [jnp.arange(length), *xs]
    fixed = num_consts + len(wholes)
    everything = [*consts, *wholes, *carry, *xs]

    def types_of(leaves: Sequence[Any], slots: Slots) -> list[Any]:
        avals = [_jax.typeof(x) for x in leaves]
        before = sum(slots.counts[: fixed + num_carry])
        return [*avals[:before], *map(_jax.unstacked_aval, avals[before:])]

    def ys_that_do_not_stack(body: Body) -> frozenset[int]:
        groups = split(body.jaxpr.out_avals, body.results.counts)
        return frozenset(
            i
            for i, (s, group) in enumerate(zip(body.results.structures, groups, strict=True))
            if i >= num_carry and s is not None and not _stacks_by_leaf(s, group, length)
        )

    body, seeds, everything = settle(
        trace, primitive, params["jaxpr"], everything, range(fixed, fixed + num_carry), range(fixed), types_of, around,
        ys_that_do_not_stack,
    )  # fmt: skip
    leaves, slots = flatten_all(trace, everything)
    hoisted, jaxpr = body.hoisted()
    extra = [*hoisted, *seeds]
    counts = slots.counts
    new = _jax.scan_params(
        params,
        jaxpr,
        len(extra) + sum(counts[:fixed]),
        sum(counts[fixed : fixed + num_carry]),
        sum(counts[fixed + num_carry :]),
        sum(body.results.counts[num_carry:]),
    )
    results = body.results.build(primitive.bind(*extra, *leaves, **new))
    return [x if i < num_carry else _stacked(x, length) for i, x in enumerate(results)]


def _stacks_by_leaf(structure: Structure, avals: Sequence[Any], length: int) -> bool:
    return hasattr(structure.type, "add_leading") or stacks(structure, tuple(avals), length)


def _stacked(x: Any, length: int) -> Any:
    add = getattr(type(x), "add_leading", None) if is_value(x) else None
    return x if add is None else add(x, length)


@treatment(CONSTRUCTS, _jax.while_p)
def while_loop(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the loop over leaves; the condition is traced on the carry as it has settled, and is an array."""
    n, m = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, rest = list(operands[:n]), operands[n:]

    def types_of(leaves: Sequence[Any], slots: Slots) -> list[Any]:
        return [_jax.typeof(x) for x in leaves]

    body, body_seeds, rest = settle(
        trace, primitive, params["body_jaxpr"], rest, range(m, len(rest)), range(m), types_of
    )
    cond, cond_seeds = _condition(trace, params["cond_jaxpr"], [*cond_consts, *rest[m:]], n)
    cond_hoisted, cond_jaxpr = cond.hoisted()
    body_hoisted, body_jaxpr = body.hoisted()
    cond_leaves, _ = flatten_all(trace, cond_consts)
    body_leaves, _ = flatten_all(trace, rest[:m])
    carry_leaves, _ = flatten_all(trace, rest[m:])
    before_cond = [*cond_hoisted, *cond_seeds, *cond_leaves]
    before_body = [*body_hoisted, *body_seeds, *body_leaves]
    new = dict(
        params,
        cond_jaxpr=cond_jaxpr,
        body_jaxpr=body_jaxpr,
        cond_nconsts=len(before_cond),
        body_nconsts=len(before_body),
    )
    return body.results.build(primitive.bind(*before_cond, *before_body, *carry_leaves, **new))


def _condition(trace: DispatchTrace, jaxpr: Any, operands: Sequence[Any], num_consts: int) -> tuple[Body, list[Any]]:
    leaves, slots = flatten_all(trace, operands)
    avals = [_jax.typeof(x) for x in leaves]
    plan = Plan(slots)
    body = body_over_leaves(jaxpr, plan, avals)
    (structure,) = body.results.structures
    if structure is not None and not is_leafwise(structure, body.jaxpr.out_avals):
        plan = Plan(slots, frozenset([0]))
        body = body_over_leaves(jaxpr, plan, avals)
    body, seeds = seeded(trace, jaxpr, plan, body, operands, num_consts)
    return body.used(), seeds
