"""The parts of a value, where each of them has the array's shape and speaks of the same elements.

A quantity has one part, its numbers; a masked array has two, its numbers and its mask. A *mapping* says what the parts are:
``mapping(x, f)`` is the value ``x`` with ``f(part)`` in place of each part. It is the type's own `map_parts`, or `map_leaves`.
What a value holds beside its parts is the same for every element: a unit, a factor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from ._value import aval_of, flatten, is_value
from .errors import PartsError

Mapping = Callable[[Any, Callable[[Any], Any]], Any]


def map_leaves(x: Any, f: Callable[[Any], Any]) -> Any:
    """Return a value with ``f`` applied to each of its arrays.

    ``map_parts = mx.map_leaves`` in a class says that its arrays are its parts.

    Args:
        x: A value whose type is a pytree.
        f: A function of an array.

    Raises:
        PartsError: If the type is no pytree.
    """
    leaves, structure = flatten(x)
    if structure is None:
        kind = type(x).__name__
        raise PartsError(f"`{kind}` is no pytree, so it has no leaves. Write its `map_parts(self, f)`.")
    return structure.build([f(leaf) for leaf in leaves])


def parts_of(x: Any, mapping: Mapping) -> list[Any]:
    """Return the parts of a value.

    Raises:
        PartsError: If a part does not have the shape of the array.
    """
    found: list[Any] = []

    def note(part: Any) -> Any:
        found.append(part)
        return part

    mapping(x, note)
    shape = aval_of(x).shape
    for part in found:
        if jnp.shape(part) != shape:
            raise PartsError(
                f"`{type(x).__name__}.map_parts` names a part of shape {jnp.shape(part)}, and the array has shape {shape}. "
                "A part has the array's shape, element by element. For other layouts there are the hooks `scale_by`, "
                "`add_to` and `contract_with`, and rules."
            )
    return found


def with_parts(x: Any, parts: Sequence[Any], mapping: Mapping) -> Any:
    """Return a value with other parts."""
    rest = iter(parts)
    return mapping(x, lambda _: next(rest))


def aligned(xs: Sequence[Any], mapping: Mapping) -> list[list[Any]] | None:
    """Return the parts of values that go together; None if they do not.

    They do if they differ in their parts only. An array goes with a value whose type makes one of it, by `from_array`.

    Args:
        xs: At least one value, and arrays of its dtype.
        mapping: Says what the parts are.
    """
    like = next(x for x in xs if is_value(x))
    parts = parts_of(like, mapping)
    rows, frame = [], None
    for x in xs:
        if x is like:
            rows.append(parts)
            continue
        if not is_value(x):
            x = value_of_array(x, like, parts, mapping)
            if x is None:
                return None
        row = parts_of(x, mapping)
        frame = frame or _frame(like, parts)
        if frame[0] is None or not _is_same_frame(frame, _frame(x, row)):
            return None
        rows.append(row)
    return rows


def value_of_array(array: Any, like: Any, parts: Sequence[Any], mapping: Mapping) -> Any:
    """Return what an array stands for beside a value with these parts: by the type's `from_array`, or None."""
    make = getattr(type(like), "from_array", None)
    if make is None:
        return None
    array = lax.convert_element_type(array, aval_of(like).dtype)
    types = [jax.ShapeDtypeStruct(array.shape, lax.dtype(part)) for part in parts]
    return make(array, with_parts(like, types, mapping))


def _frame(x: Any, parts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What a value is beside its parts: its structure, and the leaves that belong to none of them."""
    leaves, structure = flatten(x)
    inside = {id(leaf) for part in parts for leaf in jtu.tree_leaves(part)}
    return structure, [leaf for leaf in leaves if id(leaf) not in inside]


def _is_same_frame(a: tuple[Any, list[Any]], b: tuple[Any, list[Any]]) -> bool:
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(x is y for x, y in zip(a[1], b[1], strict=True))
