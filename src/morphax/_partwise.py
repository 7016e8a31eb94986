"""Binds of a primitive on each part of a value: right where it moves elements, or is linear in them as the array is.

Operands hold *elements*, which are values, or say where and which: indices, a predicate, a factor. These have to be arrays,
and are the same for each part.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._parts import Mapping, aligned, parts_of, value_of_array, with_parts
from ._value import aval_of, is_value
from .primitives import STRUCTURAL

ELEMENTS: dict[Any, slice] = {
    lax.broadcast_in_dim_p: slice(0, 1),
    lax.dynamic_slice_p: slice(0, 1),
    lax.dynamic_update_slice_p: slice(0, 2),
    lax.gather_p: slice(0, 1),
    lax.reshape_p: slice(0, 1),
    lax.scatter_add_p: slice(0, 3, 2),
    lax.scatter_p: slice(0, 3, 2),
    lax.select_n_p: slice(1, None),
}
"""Per primitive the operands that hold elements; those of one that is not listed all do."""

MOVES = (*STRUCTURAL, lax.select_n_p, lax.scatter_p)
"""Primitives that give elements of their operands, each untouched."""


def elements_of(primitive: Any, operands: Sequence[Any]) -> range:
    """The positions of the operands that hold elements."""
    return range(len(operands))[ELEMENTS.get(primitive, slice(None))]


def keeps_numbers(old: Any, new: Any) -> bool:
    """Whether a conversion changes numbers by rounding alone: not to integers, and not from complex numbers to real ones."""
    is_complex = jnp.issubdtype(old, jnp.complexfloating)
    return jnp.issubdtype(new, jnp.complexfloating if is_complex else jnp.inexact)


def partwise(
    primitive: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
    mapping: Mapping,
    elements: Sequence[int],
    *,
    computes: bool = False,
) -> Any:
    """Bind a primitive on each part.

    Args:
        primitive: The primitive.
        operands: Arrays and values.
        params: Kept for each part.
        mapping: Says what the parts are.
        elements: The positions of the operands that hold elements.
        computes: Whether it computes with the elements, so that each part has to consist of numbers like the array's.

    Returns:
        What the primitive returns, made of values; `NotImplemented` where the operands do not go together.
    """
    held = [operands[i] for i in elements]
    if any(is_value(x) for i, x in enumerate(operands) if i not in elements) or not any(map(is_value, held)):
        return NotImplemented
    like = next(x for x in held if is_value(x))
    rows = aligned(held, mapping)
    if rows is None or (computes and any(lax.dtype(part) != aval_of(like).dtype for part in rows[0])):
        return NotImplemented
    fills = _fills(primitive, like, rows[0], params, mapping)
    if fills is None:
        return NotImplemented
    results = []
    for column, fill in zip(zip(*rows, strict=True), fills, strict=True):
        given = list(operands)
        for i, part in zip(elements, column, strict=True):
            given[i] = part
        results.append(_bind(primitive, given, {**params, **fill}))
    if primitive.multiple_results:
        return [with_parts(like, parts, mapping) for parts in zip(*results, strict=True)]
    return with_parts(like, results, mapping)


def _bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    if primitive is not lax.scatter_p:
        return primitive.bind(*operands, **params)
    rest = {name: x for name, x in params.items() if name not in ("update_jaxpr", "update_consts")}
    return lax.scatter(*operands, **rest)  # the jaxpr of its update is made for a dtype


def _fills(
    primitive: Any, like: Any, parts: Sequence[Any], params: dict[str, Any], mapping: Mapping
) -> list[dict[str, Any]] | None:
    """Per part the parameter that says what lies out of bounds; None if that is not known."""
    if primitive is not lax.gather_p or params["mode"] is not lax.GatherScatterMode.FILL_OR_DROP:
        return [{}] * len(parts)
    fill = params["fill_value"]
    if hasattr(type(like), "from_array"):
        if fill is None:
            fill = _usual_fill(aval_of(like).dtype)
        with jax.ensure_compile_time_eval():
            filler = value_of_array(np.asarray(fill), like, parts, mapping)
            return [{"fill_value": np.asarray(part).item()} for part in parts_of(filler, mapping)]
    linear = getattr(type(like), "linear", None) is True
    floating = all(jnp.issubdtype(lax.dtype(part), jnp.inexact) for part in parts)
    if linear and fill == 0:
        return [{"fill_value": fill}] * len(parts)
    if floating and (fill is None or np.isnan(fill)) and (linear or len(parts) == 1):  # else one may hide another's NaN
        return [{"fill_value": fill}] * len(parts)
    return None


def _usual_fill(dtype: Any) -> Any:
    """What a gather puts out of bounds by itself."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
