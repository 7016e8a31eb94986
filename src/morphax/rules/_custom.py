"""`custom_jvp` and `custom_vjp` functions inside a wrapped function keep their derivative rules.

The call is bound over leaves. The functions in it then speak of leaves to JAX and of arrays to the user: the tangent of a
value is the tangent of the array that it stands for, and a cotangent is pulled back to the leaves. A result stays a value
only where its array is its one leaf, since only then tangents and cotangents of the array are those of the leaf; any other
becomes an array, in the function and in its rule alike.

The functions outlive the call, in an equation's parameters. So they hold structures, and never a value or a tracer.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .. import _jax
from .._differentiation import (
    dense_tangent,
    has_no_tangent,
    is_declared_linear,
    leaf_cotangents,
    meaning,
    tangent_leaves,
)
from .._trace import CONSTRUCTS, DispatchTrace, subtrace, treatment
from .._value import Structure, aval_of, flatten, is_value
from ..errors import DifferentiationError
from ._body import Slots, flatten_all, split


class _Results:
    """How the results of a call lie. Its function and its rule run at different times, and must agree."""

    def __init__(self) -> None:
        self.slots = Slots(())
        self._known = False

    def flatten(self, trace: DispatchTrace, outs: Sequence[Any]) -> list[Any]:
        """Return the leaves of the results, as the first run laid them."""
        if not self._known:
            self._known = True
            kept = [x if _is_one_leaf(x) or has_no_tangent(x) else _dense(trace, x) for x in outs]
            leaves, self.slots = flatten_all(trace, kept)
            return leaves
        return [leaf for x, s in zip(outs, self.slots.structures, strict=True) for leaf in self._conform(trace, x, s)]

    def _conform(self, trace: DispatchTrace, x: Any, structure: Structure | None) -> list[Any]:
        if structure is None:
            return [_dense(trace, x)]
        if is_value(x):
            leaves, own = flatten(x)
            if own == structure:
                return leaves
        array = _dense(trace, x)
        if meaning(structure, [_jax.typeof(array)]).refuses:
            raise DifferentiationError(
                f"a custom derivative rule returned an array where its function returned a value with the structure "
                f"{structure}, which no array can stand for. Register rules so that both give the same type."
            )
        return [array]

    def tangents(self, trace: DispatchTrace, outs: Sequence[Any]) -> list[Any]:
        """Return the tangents of the leaves: for a value of one leaf, that of the array."""
        return [
            flatten(t)[0][0] if s is not None and _is_one_leaf(t) else _dense(trace, t)
            for t, s in zip(outs, self.slots.structures, strict=True)
        ]


def _is_one_leaf(x: Any) -> bool:
    if not is_value(x):
        return False
    leaves, structure = flatten(x)
    return structure is not None and meaning(structure, [_jax.typeof(leaf) for leaf in leaves]).identity


def _dense(trace: DispatchTrace, x: Any) -> Any:
    return trace.dense(x) if is_value(x) else x


def _is_zero(t: Any) -> bool:
    return isinstance(t, (_jax.SymbolicZero, _jax.Zero))


def _instantiated(t: Any) -> Any:
    return _jax.zeros(t.aval) if _is_zero(t) else t


def _tangent(structure: Structure | None, primals: Sequence[Any], tangents: Sequence[Any], symbolic: bool) -> Any:
    """Return what a `custom_jvp` rule is to be given as the tangent of an operand."""
    if structure is None:
        (t,) = tangents
        return t if symbolic else _instantiated(t)
    if not _moves(primals, tangents) and not is_declared_linear(structure):
        zero = aval_of(structure.build(primals)).to_tangent_aval()
        return _jax.SymbolicZero(zero) if symbolic else _jax.zeros(zero)
    if meaning(structure, [_jax.typeof(p) for p in primals]).linear:
        return structure.build(tangent_leaves(primals, tangents))
    return dense_tangent(structure, primals, tangents)


def _moves(primals: Sequence[Any], tangents: Sequence[Any]) -> bool:
    """Whether a value has a tangent: of its integers there is none."""
    return any(_jax.is_inexact(_jax.typeof(p)) and not _is_zero(t) for p, t in zip(primals, tangents, strict=True))


def _wrapped(fun: Any, original: Any) -> Any:
    return _jax.wrap_init(fun, debug_info=original.debug_info.with_unknown_names())


def _through_body(fun: Any, primals_and_tangents: Sequence[Any]) -> list[Any]:
    """Differentiate a function over leaves itself, where its rule speaks of arrays that nobody can have."""
    half = len(primals_and_tangents) // 2
    tangents = tuple(map(_instantiated, primals_and_tangents[half:]))
    outs, tangents_out = jax.jvp(fun, tuple(primals_and_tangents[:half]), tangents)
    return [*outs, *tangents_out]


@treatment(CONSTRUCTS, _jax.custom_jvp_call_p)
def custom_jvp_call(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the call over leaves, with a function and a rule over leaves."""
    fun, jvp = params["subfuns"]
    symbolic = params["symbolic_zeros"]
    leaves, slots = flatten_all(trace, operands)
    tag, results = trace.tag, _Results()

    def fun_over_leaves(*leaves: Any):
        _jax.reset_stores(fun)
        with subtrace(tag) as inner:
            return results.flatten(inner, inner.call(fun.call_wrapped, slots.build(leaves)))

    def jvp_over_leaves(*primals_and_tangents: Any):
        _jax.reset_stores(jvp)
        half = len(primals_and_tangents) // 2
        primals = split(primals_and_tangents[:half], slots.counts)
        tangents = split(primals_and_tangents[half:], slots.counts)
        parts = list(zip(slots.structures, primals, tangents, strict=True))
        if any(_moves(p, t) and has_no_tangent(s.build(p)) for s, p, t in parts if s is not None):
            return _through_body(fun_over_leaves, primals_and_tangents)
        with subtrace(tag) as inner:
            directions = [_tangent(s, p, t, symbolic) for s, p, t in parts]
            outs = inner.call(jvp.call_wrapped, [*slots.build(primals_and_tangents[:half]), *directions])
            values, tangents_out = outs[: len(outs) // 2], outs[len(outs) // 2 :]
            if any(map(has_no_tangent, values)):
                return _through_body(fun_over_leaves, primals_and_tangents)
            return [*results.flatten(inner, values), *results.tangents(inner, tangents_out)]

    # Symbolic zeros are asked for whatever the user did, so that a value that does not move costs nothing.
    outs = primitive.bind(
        *leaves, subfuns=(_wrapped(fun_over_leaves, fun), _wrapped(jvp_over_leaves, jvp)), symbolic_zeros=True
    )
    return results.slots.build(outs)


@treatment(CONSTRUCTS, _jax.custom_vjp_call_p)
def custom_vjp_call(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind the call over leaves. Values among the residuals come back as values; cotangents are pulled back to leaves."""
    fun, fwd, bwd = params["subfuns"]
    out_trees = params["out_trees"]
    if any(map(has_no_tangent, operands)):
        return trace.call(fun.call_wrapped, operands)
    leaves, slots = flatten_all(trace, operands)
    avals = [_jax.typeof(x) for x in leaves]
    tag, results = trace.tag, _Results()
    positions = split(range(len(leaves)), slots.counts)
    of_values = [i for group, s in zip(positions, slots.structures, strict=True) if s is not None for i in group]
    residuals: list[Slots] = []  # how the residuals lie, once the forward function has run
    forwarded: list[list[int | None]] = []
    moving: set[int] = set()  # the operands that any run of the forward function was differentiated in

    def fun_over_leaves(*leaves: Any):
        _jax.reset_stores(fun)
        with subtrace(tag) as inner:
            return results.flatten(inner, inner.call(fun.call_wrapped, slots.build(leaves)))

    def fwd_over_leaves(*leaves_and_moves: Any):
        _jax.reset_stores(fwd)
        leaves, moves = leaves_and_moves[::2], leaves_and_moves[1::2]
        moved = [any(group) for group in split(moves, slots.counts)]
        moving.update(i for i, m in enumerate(moved) if m)
        with subtrace(tag) as inner:
            interleaved = [x for pair in zip(slots.build(leaves), moved, strict=True) for x in pair]
            outs = inner.call(fwd.call_wrapped, interleaved)
            _, _, input_fwds = out_trees()
            pruned, outs = outs[: input_fwds.count(None)], outs[input_fwds.count(None) :]
            res_leaves, res_slots = flatten_all(inner, pruned)
            structures = iter(res_slots.structures)
            lies = Slots(tuple(next(structures) if i is None else slots.structures[i] for i in input_fwds))
            groups = zip(input_fwds, lies.counts, strict=True)
            residuals[:] = [lies]
            forwarded[:] = [[f for i, n in groups for f in ([None] * n if i is None else positions[i])]]
            return [*res_leaves, *results.flatten(inner, outs)]

    def trees_over_leaves():
        # The leaves of values come last among the residuals: cotangents are pulled back at them.
        fwds = [*forwarded[0], *of_values]
        return _tree_of(sum(results.slots.counts)), _tree_of(len(fwds)), fwds

    def bwd_over_leaves(*residuals_and_cotangents: Any):
        num_residuals = sum(residuals[0].counts)
        res = residuals_and_cotangents[:num_residuals]
        points = dict(zip(of_values, residuals_and_cotangents[num_residuals:], strict=False))
        cts = residuals_and_cotangents[num_residuals + len(of_values) :]
        with subtrace(tag) as inner:
            boxed = [inner.box(x) for x in residuals[0].build(res)]
            with _jax.set_current_trace(inner):
                found, logs = _jax.call_cotangents(bwd.call_wrapped(*boxed, *cts))
            pulled = [
                ct
                for i, (c, s, group) in enumerate(
                    zip(map(inner.unbox_tree, found), slots.structures, positions, strict=True)
                )
                for ct in _pull_back(
                    inner, c if i in moving else None, s, [points.get(j) for j in group], [avals[j] for j in group]
                )
            ]
        return _jax.join_cotangents(pulled, logs)

    subfuns = (_wrapped(fun_over_leaves, fun), _wrapped(fwd_over_leaves, fwd), _wrapped(bwd_over_leaves, bwd))
    outs = primitive.bind(
        *leaves, subfuns=subfuns, out_trees=trees_over_leaves, symbolic_zeros=params["symbolic_zeros"]
    )
    return results.slots.build(outs)


def _tree_of(n: int) -> Any:
    return jtu.tree_structure([0] * n)


def _pull_back(
    trace: DispatchTrace, ct: Any, structure: Structure | None, leaves: Sequence[Any], avals: Sequence[Any]
) -> list[Any]:
    """Return the cotangents of an operand's leaves, given that of its array (None if it is not wanted)."""
    if _is_zero(ct) or ct is None:
        return [_jax.Zero(a.to_tangent_aval()) for a in avals]
    if structure is None:
        return [_dense(trace, ct)]
    found = leaf_cotangents(structure, leaves, avals, ct)
    return [_jax.Zero(a.to_tangent_aval()) if c is None else c for c, a in zip(found, avals, strict=True)]
