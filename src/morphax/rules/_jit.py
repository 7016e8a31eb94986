"""`jit` inside a wrapped function: the same bind over leaves, with each of its parameters."""

from collections.abc import Callable, Sequence
from typing import Any

from .. import _jax
from .._trace import CONSTRUCTS, DispatchTrace, treatment
from ._body import Body, body_over_leaves, flatten_all


@treatment(CONSTRUCTS, _jax.jit_p)
def jit(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the jit over the leaves of its operands."""
    leaves, slots = flatten_all(trace, operands)
    avals = [_jax.typeof(x) for x in leaves]
    jaxpr = params["jaxpr"]
    body = body_over_leaves(jaxpr, slots, avals)
    program, consts = body.jaxpr, []
    if any(isinstance(c, _jax.Tracer) for c in program.consts):  # a jit's own constants must be known
        program, consts = _jax.open_jaxpr(program)
        program = _jax.close_jaxpr(program)
    new = _jax.jit_params(
        params,
        program,
        len(consts),
        slots.shaped_alike(jaxpr.in_avals, avals),
        body.results.shaped_alike(jaxpr.out_avals, body.jaxpr.out_avals),
    )
    call = _callable(body, new) if trace.parent_trace is _jax.eval_trace and not consts else None
    return body.results.build(primitive.bind(*consts, *leaves, **new) if call is None else call(*leaves))


def _callable(body: Body, params: dict[str, Any]) -> Callable | None:
    """The program as a `jax.jit` callable: at the top level its calls go through C++, those of `bind` do not."""
    key = tuple(params[name] for name in ("name", "donated_invars", "keep_unused", "inline"))
    if key not in body.callables:
        body.callables[key] = _jax.jit_callable(params)
    return body.callables[key]
