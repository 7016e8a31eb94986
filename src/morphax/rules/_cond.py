"""`cond`, `switch` and `platform_dependent` inside a wrapped function."""

from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._trace import CONSTRUCTS, DispatchTrace, treatment
from .._value import is_value
from ..errors import MaterializationError, StructureError
from ._body import Body, Plan, body_over_leaves, flatten_all, split


@treatment(CONSTRUCTS, _jax.cond_p)
def cond(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the choice over leaves. Where branches give a result different forms, it becomes an array in all of them."""
    index, *rest = operands
    leaves, slots = flatten_all(trace, rest)
    avals = [_jax.typeof(x) for x in leaves]
    dense: frozenset[int] = frozenset()
    while True:
        bodies = _branches(primitive, params["branches"], Plan(slots, dense), avals)
        clashes = _clashes(bodies)
        if clashes <= dense:
            break
        dense |= clashes
    consts, programs = _with_all_constants([body.used() for body in bodies], avals)
    index = trace.dense(index) if is_value(index) else index
    outs = primitive.bind(index, *consts, *leaves, **{**params, "branches": programs})
    return bodies[0].results.build(outs)


def _branches(construct: Any, branches: Sequence[Any], plan: Plan, avals: Sequence[Any]) -> list[Body]:
    try:
        return [body_over_leaves(jaxpr, plan, avals) for jaxpr in branches]
    except MaterializationError as error:
        if not plan.dense:
            raise
        raise StructureError(
            f"the branches of `{construct}` return values of different structure as result {sorted(plan.dense)[0]}, which "
            f"then has to be an array, and it refuses: {error}\nAt {_jax.user_line()}.\nLet all branches return the same "
            "structure."
        ) from error


def _clashes(bodies: Sequence[Body]) -> frozenset[int]:
    """The results that some branches return in another form than the first."""
    first = bodies[0]
    forms = split(first.jaxpr.out_avals, first.results.counts)
    clashes = set()
    for body in bodies[1:]:
        groups = split(body.jaxpr.out_avals, body.results.counts)
        for i, (s, t) in enumerate(zip(first.results.structures, body.results.structures, strict=True)):
            if s != t or (s is not None and not all(map(_jax.same_type, forms[i], groups[i]))):
                clashes.add(i)
    return frozenset(clashes)


def _with_all_constants(bodies: Sequence[Body], avals: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Give every branch the constants of all, since all branches take the same inputs."""
    if not any(body.jaxpr.consts for body in bodies):
        return [], tuple(body.jaxpr for body in bodies)
    hoisted = [body.hoisted() for body in bodies]
    consts = [c for own, _ in hoisted for c in own]
    types = [_jax.typeof(c) for c in consts]
    programs, start = [], 0
    for own, program in hoisted:
        programs.append(_jax.trace_jaxpr(_taking(program, start, len(own), len(consts)), [*types, *avals]))
        start += len(own)
    return consts, tuple(programs)


def _taking(program: Any, start: int, n: int, num_consts: int) -> Any:
    return lambda *xs: _jax.eval_jaxpr(program)(*xs[start : start + n], *xs[num_consts:])
