"""`custom_linear_solve` inside a wrapped function: `jnp.linalg.solve`, `cg`, `gmres`, `bicgstab`."""

from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._trace import CONSTRUCTS, DispatchTrace, treatment
from .._value import is_value
from ._body import Plan, body_over_leaves, flatten_all, seeded, split


@treatment(CONSTRUCTS, _jax.linear_solve_p)
def custom_linear_solve(
    trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Bind the solve with operators over leaves: a lazy matrix is applied in every iteration, and never made dense.

    What is solved for lives in the space of arrays, so right-hand sides and results are arrays.
    """
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    groups = split(operands[: sum(lengths)], lengths)
    rhs = [trace.dense(x) if is_value(x) else x for x in operands[sum(lengths) :]]
    programs, consts = [], []
    for jaxpr, group in zip(jaxprs, groups, strict=True):
        if jaxpr is None:
            programs.append(None)
            consts.append([])
            continue
        vectors = jaxpr.in_avals[len(group) :]
        leaves, slots = flatten_all(trace, group)
        avals = [_jax.typeof(x) for x in leaves]
        plan = Plan(slots.extended(len(vectors)), frozenset(range(len(jaxpr.out_avals))))
        body = body_over_leaves(jaxpr, plan, [*avals, *vectors])
        body, seeds = seeded(trace, jaxpr, plan, body, [*group, *vectors], len(group))  # once, before the iterations
        hoisted, program = body.used().hoisted()
        programs.append(program)
        consts.append([*hoisted, *seeds, *leaves])
    new = dict(params, jaxprs=type(jaxprs)(*programs), const_lengths=type(lengths)(*map(len, consts)))
    return list(primitive.bind(*(x for group in consts for x in group), *rhs, **new))
