"""How the array of a value depends on its leaves: the derivative and batching rules of the `value` primitive.

The tangent of a value is the tangent of the array that it stands for, and that is a value of leaf tangents only where the
array is linear in the leaves. So everything here begins with one question, `meaning`, which is answered by tracing
`__jax_array__` once per structure.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from . import _jax
from ._value import (
    Structure,
    aval_of_structure,
    dense_jaxpr,
    dense_of_leaves,
    flatten,
    is_value,
    materialize,
    trace_abstractly,
    value_p,
)
from .errors import MaterializationError


class Meaning(NamedTuple):
    """How a value's array depends on its leaves."""

    refuses: bool  # `__jax_array__` raises
    linear: bool  # linear in the inexact leaves, the other leaves being constants
    identity: bool  # the array is the one leaf


def is_declared_linear(structure: Structure) -> bool:
    """Whether the type says that its array is linear in its floating leaves."""
    return getattr(structure.type, "linear", None) is True


def meaning(structure: Structure, avals: Sequence[Any]) -> Meaning:
    """Say how the array of a value with this structure and leaves of these types depends on the leaves.

    Linear means declared so by the type (``linear = True``), or that the tangent map of `__jax_array__` neither uses an
    inexact primal leaf nor differs from `__jax_array__` itself. (That it can be transposed would prove nothing: ``a + 1``.)
    """
    return _meaning(structure, tuple(avals), _jax.trace_context())


@functools.lru_cache(maxsize=4096)
def _meaning(structure: Structure, avals: tuple[Any, ...], context: Any) -> Meaning:
    if not avals:  # nothing to be differentiated in; whether it refuses shows when its array is wanted
        return Meaning(False, True, False)
    declared = is_declared_linear(structure)
    try:
        dense = dense_jaxpr(structure, avals, context)
    except MaterializationError:
        return Meaning(True, declared, declared and len(avals) == 1)
    jaxpr, _ = _jax.open_jaxpr(dense)
    identity = len(avals) == 1 and jaxpr.outvars[0] is jaxpr.invars[-1]
    return Meaning(False, declared or identity or _is_linear(structure, avals), identity)


def _is_linear(structure: Structure, avals: tuple[Any, ...]) -> bool:
    inexact = [_jax.is_inexact(aval) for aval in avals]
    moving = [aval for aval, moves in zip(avals, inexact, strict=True) if moves]
    fixed = [aval for aval, moves in zip(avals, inexact, strict=True) if not moves]

    def dense(constants: Any, leaves: Any):
        constants, leaves = iter(constants), iter(leaves)
        return materialize(structure.build([next(leaves) if moves else next(constants) for moves in inexact]))

    def itself(*xs: Any):
        return [dense(xs[: len(fixed)], xs[len(fixed) :])]

    def tangent(*xs: Any):
        primals, constants, tangents = np.split(np.arange(len(xs)), [len(moving), len(moving) + len(fixed)])
        constants = [xs[i] for i in constants]
        point, direction = tuple(xs[i] for i in primals), tuple(xs[i] for i in tangents)
        return [jax.jvp(lambda *leaves: dense(constants, leaves), point, direction)[1]]

    tangent_jaxpr, used = _jax.dce_jaxpr(_jax.inlined(trace_abstractly(tangent, [*moving, *fixed, *moving])))
    if any(used[: len(moving)]) or not all(used[len(moving) + len(fixed) :]):
        return False
    itself_jaxpr, _ = _jax.dce_jaxpr(_jax.inlined(trace_abstractly(itself, [*fixed, *moving])))
    return str(tangent_jaxpr) == str(itself_jaxpr)


def has_no_tangent(x: Any) -> bool:
    """Whether a value is neither linear in its leaves nor an array that could be differentiated."""
    if not is_value(x):
        return False
    leaves, structure = flatten(x)
    if structure is None:
        return False
    facts = meaning(structure, [_jax.typeof(leaf) for leaf in leaves])
    return facts.refuses and not facts.linear


def is_leafwise(structure: Structure, avals: Sequence[Any]) -> bool:
    """Whether the one leaf of a value can be cut and stacked as its array can.

    So where the array is the leaf. A type that refuses to say what its array is, and has one leaf of the array's shape (a
    quantity with a unit), is taken for such a one: it could not be used in a loop otherwise.
    """
    facts = meaning(structure, avals)
    if not facts.refuses or facts.identity:
        return facts.identity
    return len(avals) == 1 and avals[0].shape == aval_of_structure(structure, tuple(avals), _jax.trace_context()).shape


def tangent_leaves(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Return the leaves of a linear value's tangent: zeros made explicit, and the primal where a leaf has no tangent."""
    return [
        _jax.instantiate(_jax.Zero(t.aval) if isinstance(t, _jax.SymbolicZero) else t)
        if _jax.is_inexact(_jax.typeof(p))
        else p
        for p, t in zip(primals, tangents, strict=True)
    ]


def dense_tangent(structure: Structure, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return the tangent of the array that a value stands for, given the tangents of its leaves."""
    moves = [_jax.is_inexact(_jax.typeof(p)) for p in primals]

    def dense(*given: Any):
        moving = iter(given)
        return dense_of_leaves(
            *(next(moving) if m else p for p, m in zip(primals, moves, strict=True)), structure=structure
        )

    point = tuple(p for p, m in zip(primals, moves, strict=True) if m)
    direction = tuple(t for t, m in zip(tangent_leaves(primals, tangents), moves, strict=True) if m)
    return jax.jvp(dense, point, direction)[1]


def _jvp(primals: Any, tangents: Any, *, structure: Any):
    out = value_p.bind(*primals, structure=structure)
    if all(isinstance(t, _jax.Zero) for t in tangents):
        return out, _jax.Zero(_jax.typeof(out).to_tangent_aval())
    if meaning(structure, [_jax.typeof(p) for p in primals]).linear:
        return out, value_p.bind(*tangent_leaves(primals, tangents), structure=structure)
    return out, dense_tangent(structure, primals, tangents)


def leaf_cotangents(structure: Structure, leaves: Sequence[Any], avals: Sequence[Any], ct: Any) -> list[Any]:
    """Pull the cotangent of a value's array back to its leaves.

    Args:
        structure: The value's structure.
        leaves: Its leaves; those of a linear value that are being differentiated need not be known.
        avals: The types of its leaves.
        ct: A dense cotangent of the value's shape, or a value that has `__jax_array__`.

    Returns:
        Per leaf its cotangent, ``None`` for a leaf without one (integers, keys).
    """
    moves = [_jax.is_inexact(aval) for aval in avals]
    facts = meaning(structure, avals)
    if facts.identity and is_value(ct) and flatten(ct)[1] == structure:
        return flatten(ct)[0]
    own = getattr(structure.type, "cotangent", None)
    if facts.linear and own is not None:
        like = structure.build(
            [jax.ShapeDtypeStruct(a.shape, a.dtype) if m else x for x, a, m in zip(leaves, avals, moves, strict=True)]
        )
        return [c if m else None for c, m in zip(jtu.tree_leaves(own(like, ct)), moves, strict=True)]
    if facts.refuses:
        if sum(moves) != 1:
            raise MaterializationError(
                f"the cotangent of a `{structure.type.__name__}` has to reach its {sum(moves)} floating leaves, and its "
                "`__jax_array__` refuses. Define `cotangent(self, ct)` on the type, returning a value of cotangents."
            )
        return [ct if m else None for m in moves]

    def dense(*given: Any):
        moving = iter(given)
        return dense_of_leaves(
            *(next(moving) if m else x for x, m in zip(leaves, moves, strict=True)), structure=structure
        )

    ct = materialize(ct)
    if facts.linear:
        pulled = jax.linear_transpose(dense, *(a for a, m in zip(avals, moves, strict=True) if m))(ct)
    else:
        pulled = jax.vjp(dense, *(x for x, m in zip(leaves, moves, strict=True) if m))[1](ct)
    pulled = iter(pulled)
    return [next(pulled) if m else None for m in moves]


def _transpose(ct: Any, *leaves: Any, structure: Any):
    avals = [x.aval if _jax.is_undefined_primal(x) else _jax.typeof(x) for x in leaves]
    if isinstance(ct, _jax.Zero):
        return [
            _jax.Zero(a.to_tangent_aval()) if _jax.is_undefined_primal(x) else None
            for x, a in zip(leaves, avals, strict=True)
        ]
    cotangents = leaf_cotangents(structure, leaves, avals, ct)
    return [c if _jax.is_undefined_primal(x) else None for x, c in zip(leaves, cotangents, strict=True)]


def stacks(structure: Structure, avals: tuple[Any, ...], size: int) -> bool:
    """Whether the value of stacked leaves stands for the stacked arrays.

    That the shape follows does not show it (``a + a.T``, ``a / norm(a)``): the program over stacked leaves must be the
    batched program.

    Args:
        structure: The structure of the value.
        avals: The types of the leaves of one slice.
        size: The length of the new leading axis.
    """
    return _stacks(structure, avals, size, _jax.trace_context())


@functools.lru_cache(maxsize=4096)
def _stacks(structure: Structure, avals: tuple[Any, ...], size: int, context: Any) -> bool:
    stacked = tuple(_jax.stacked_aval(size, a) for a in avals)
    try:
        shape = aval_of_structure(structure, stacked, context).shape
        if shape != (size, *aval_of_structure(structure, avals, context).shape) or not stacked:
            return False
        if _consists_of_parts(structure, stacked):
            return True
        if meaning(structure, avals).refuses:
            return is_leafwise(structure, avals)
        whole = dense_jaxpr(structure, stacked, context)
        batched = trace_abstractly(
            lambda *leaves: [jax.vmap(functools.partial(dense_of_leaves, structure=structure))(*leaves)], stacked
        )
    except Exception:  # the author's code meets shapes that it was not written for; then it does not stack
        return False
    return str(_jax.inlined(whole)) == str(_jax.inlined(batched))


def _consists_of_parts(structure: Structure, avals: Sequence[Any]) -> bool:
    """Whether the type says by `map_parts` that all of its leaves are laid out as the array."""
    if not hasattr(structure.type, "map_parts"):
        return False
    found: list[bool] = []

    def ask(*leaves: Any):
        parts: list[Any] = []

        def note(part: Any):
            parts.append(part)
            return part

        structure.build(leaves).map_parts(note)
        found.append({id(leaf) for leaf in leaves} <= {id(part) for part in parts})
        return []

    trace_abstractly(ask, avals)
    return found[0]


def _batch(leaves: Any, axes: Any, *, structure: Any):
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    avals = tuple(
        _jax.typeof(x)
        if axis is None
        else _jax.typeof(x).update(shape=(*x.shape[:axis], *x.shape[axis + 1 :]), sharding=None)
        for x, axis in zip(leaves, axes, strict=True)
    )
    if not stacks(structure, avals, size):
        return jax.vmap(functools.partial(dense_of_leaves, structure=structure), in_axes=tuple(axes))(*leaves), 0
    stacked = [
        jax.numpy.broadcast_to(x, (size, *x.shape)) if axis is None else jax.numpy.moveaxis(x, axis, 0)
        for x, axis in zip(leaves, axes, strict=True)
    ]
    return value_p.bind(*stacked, structure=structure), 0


_jax.primitive_jvps[value_p] = _jvp
_jax.primitive_transposes[value_p] = _transpose
_jax.primitive_batchers[value_p] = _batch
