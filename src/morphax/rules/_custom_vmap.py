"""`custom_vmap` and `sequential_vmap` functions inside a wrapped function keep their batching rules."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import _jax
from .._differentiation import stacks
from .._trace import CONSTRUCTS, DispatchTrace, subtrace, treatment
from .._value import Structure, dense_of_leaves, is_value
from ._body import Plan, Slots, body_over_leaves, flatten_all, split


@treatment(CONSTRUCTS, _jax.custom_vmap_p)
def custom_vmap(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the call over leaves, with a rule that gives the user's rule values again. Results are arrays."""
    jaxpr = params["call"]
    leaves, slots = flatten_all(trace, operands)
    plan = Plan(slots, frozenset(range(len(jaxpr.out_avals))))
    body = body_over_leaves(jaxpr, plan, [_jax.typeof(x) for x in leaves])
    consts, program = body.used().hoisted()
    rule = _rule_over_leaves(params["rule"], len(consts), slots, params["in_tree"], trace.tag)
    new = dict(
        params,
        call=program,
        rule=rule,
        in_tree=jtu.tree_structure((*consts, *leaves)),
        out_tree=jtu.tree_structure([0] * len(jaxpr.out_avals)),
    )
    return list(primitive.bind(*consts, *leaves, **new))


def _rule_over_leaves(
    rule: Callable[..., Any], num_consts: int, slots: Slots, in_tree: Any, tag: Any
) -> Callable[..., Any]:
    def rule_over_leaves(axis_size: Any, batched: Any, *leaves: Any):
        batched, leaves = list(batched)[num_consts:], leaves[num_consts:]
        flags = [any(group) for group in split(batched, slots.counts)]
        with subtrace(tag) as inner:
            values = [
                _batched_operand(axis_size, s, group, flag, moved)
                for s, group, flag, moved in zip(
                    slots.structures, split(leaves, slots.counts), flags, split(batched, slots.counts), strict=True
                )
            ]
            boxed = [inner.box(x) for x in values]
            with _jax.set_current_trace(inner):
                outs, out_batched = rule(
                    axis_size, list(jtu.tree_unflatten(in_tree, flags)), *jtu.tree_unflatten(in_tree, boxed)
                )
            flat = [inner.unbox(x) for x in jtu.tree_leaves(outs)]
            flat = [inner.dense(x) if is_value(x) else x for x in flat]
        return flat, jtu.tree_leaves(out_batched)

    return rule_over_leaves


def _batched_operand(
    axis_size: int, structure: Structure | None, leaves: Sequence[Any], batched: bool, moved: Sequence[bool]
) -> Any:
    """Return an operand of a batching rule: a value if none of its leaves is batched, or all can be."""
    if structure is None:
        return leaves[0]
    if not batched:
        return structure.build(leaves)
    stacked = [x if m else jnp.broadcast_to(x, (axis_size, *x.shape)) for x, m in zip(leaves, moved, strict=True)]
    if stacks(structure, tuple(_jax.unstacked_aval(_jax.typeof(x)) for x in stacked), axis_size):
        return structure.build(stacked)
    return jax.vmap(lambda *xs: dense_of_leaves(*xs, structure=structure))(*stacked)
