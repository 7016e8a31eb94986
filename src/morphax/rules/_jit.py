"""`jit` and the other calls of a jaxpr inside a wrapped function: the same bind over leaves, with each of its parameters."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax.numpy as jnp

from .. import _jax
from .._events import OBSERVERS
from .._registry import registry
from .._trace import CONSTRUCTS, DispatchTrace, treatment
from .._wrap import NotArrays, arrays_only
from ._body import Body, Plan, Slots, body_over_leaves, flatten_all, seeded


@treatment(CONSTRUCTS, _jax.jit_p)
def jit(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the jit over the leaves of its operands. One that is inlined anyway is dispatched equation by equation."""
    if _jax.is_inlined(params):
        operands = [jnp.asarray(x) if isinstance(x, _jax.LITERALS) else x for x in operands]  # as a jit gives arrays
        equations = _jax.equations_in_order(params["jaxpr"])
        if equations is not None:
            return trace.run(equations, params["jaxpr"], operands)
        return trace.call(_jax.eval_jaxpr(params["jaxpr"]), operands)
    leaves, slots = flatten_all(trace, operands)
    if trace.parent_trace is _jax.eval_trace and not OBSERVERS.get():
        call = _callable(params["jaxpr"], slots, registry.version, _Options(params))
        if call is not None:
            with suppress(NotArrays):
                return call(*leaves)
    plan, avals = Plan(slots), [_jax.typeof(x) for x in leaves]
    body = body_over_leaves(params["jaxpr"], plan, avals)
    seeds: list[Any] = []
    if trace.parent_trace is not _jax.eval_trace and not any(params["donated_invars"]):
        # Part of a larger program, where it may be in a loop, or called again: what it makes dense is made so before it.
        body, seeds = seeded(trace, params["jaxpr"], plan, body, operands, len(operands))
    consts, new = _rewritten(body.used(), slots, avals, params, len(seeds))
    return body.results.build(primitive.bind(*consts, *seeds, *leaves, **new))


def _rewritten(
    body: Body, slots: Slots, avals: Sequence[Any], params: dict[str, Any], num_seeds: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    jaxpr = params["jaxpr"]
    known = not any(isinstance(c, _jax.Tracer) for c in body.jaxpr.consts)
    consts, program = ([], body.jaxpr) if known else body.hoisted()  # a jit's own constants must be known
    return consts, _jax.jit_params(
        params,
        program,
        len(consts) + num_seeds,
        slots.shaped_alike(jaxpr.in_avals, avals),
        body.results.shaped_alike(jaxpr.out_avals, body.jaxpr.out_avals),
    )


class _Options:
    """The parameters of a jit bind but its jaxpr: a key that does not keep the jaxpr alive."""

    def __init__(self, params: dict[str, Any]):
        self.params = {name: x for name, x in params.items() if name != "jaxpr"}
        self._key = tuple(self.params.values())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Options) and other._key == self._key


@_jax.weakref_lru_cache
def _callable(jaxpr: Any, slots: Slots, version: int, options: _Options) -> Callable[..., Any] | None:
    """The program on the leaves as a `jax.jit` callable that returns values: at the top level its calls go through C++.

    None where such a callable would lose something of the bind, or could not return what the program returns.
    """
    del version  # a key
    reference = weakref.ref(
        jaxpr
    )  # this is kept by the jaxpr, and must not keep it; it is called while the jaxpr lives

    def program(*leaves: Any):
        jaxpr: Any = reference()
        body = body_over_leaves(jaxpr, Plan(slots), [_jax.typeof(x) for x in leaves])
        return arrays_only(body.results.build(_jax.eval_jaxpr(body.jaxpr)(*leaves)))

    donated = [d for d, n in zip(options.params["donated_invars"], slots.counts, strict=True) for _ in range(n)]
    return _jax.jit_callable(program, options.params, donated)


@treatment(CONSTRUCTS, _jax.remat_p)
def checkpoint(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the checkpoint over leaves: rules run in the recomputed part too. The policy stays the same object."""
    leaves, slots = flatten_all(trace, operands)
    body = body_over_leaves(_jax.close_jaxpr(params["jaxpr"]), Plan(slots), [_jax.typeof(x) for x in leaves])
    jaxpr, consts = _jax.open_jaxpr(body.used().jaxpr)
    new = _jax.remat_params(params, jaxpr, len(consts), slots.counts)
    return body.results.build(primitive.bind(*consts, *leaves, **new))


@treatment(CONSTRUCTS, _jax.eval_jaxpr_p, _jax.composite_p, _jax.xla_metadata_call_p, _jax.compute_on_p)
def call(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind a call that has nothing but its jaxpr to be rewritten; a memory space per result is one per leaf of it."""
    leaves, slots = flatten_all(trace, operands)
    name = "call_jaxpr" if "call_jaxpr" in params else "jaxpr"
    body = body_over_leaves(params[name], Plan(slots), [_jax.typeof(x) for x in leaves])
    consts, program = body.used().hoisted()
    new = {**params, name: program}
    if "out_memory_spaces" in params:
        spaces = zip(params["out_memory_spaces"], body.results.counts, strict=True)
        new["out_memory_spaces"] = tuple(space for space, n in spaces for _ in range(n))
    return body.results.build(primitive.bind(*consts, *leaves, **new))
