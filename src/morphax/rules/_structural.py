"""Moving the elements of a value that refuses to become an array: a last resort before the error.

A type whose rules make the product of two of its values a value again, and that has one leaf of the array's shape and dtype,
is taken for one whose leaf holds the array's elements, such as a quantity with a unit. Moving elements of the leaf is then
moving elements of the array, and without it every such type would need a rule for each of some twenty primitives. Nothing is
assumed of a type that can say what its array is: it is made dense. A leaf of the right shape alone would prove too little
(the inverse of a matrix that is kept as that matrix), but such a type has no products element by element. What is written down
is better: `morphax.derive`, and one rule for the family that raises, where elements must not be moved so.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._differentiation import is_leafwise, meaning
from .._parts import map_leaves
from .._partwise import MOVES, elements_of, keeps_numbers, partwise
from .._registry import registry
from .._trace import FALLBACKS, DispatchTrace, subtrace, treatment
from .._value import Structure, aval_of, flatten, is_value, trace_abstractly


def _leaf_holds_elements(x: Any) -> bool:
    leaves, structure = flatten(x)
    avals = tuple(_jax.typeof(leaf) for leaf in leaves)
    if structure is None or len(leaves) != 1 or not meaning(structure, avals).refuses:
        return False
    alike = is_leafwise(structure, avals) and avals[0].dtype == aval_of(x).dtype
    return alike and _has_products(structure, avals, registry.version, _jax.trace_context())


@functools.lru_cache(maxsize=4096)
def _has_products(structure: Structure, avals: tuple[Any, ...], version: int, context: Any) -> bool:
    """Whether the product of two such values is a value of the type."""
    del version, context  # keys: what the rules are, and what tracing depends on
    found: list[bool] = []

    def product(*leaves: Any) -> list[Any]:
        with subtrace() as trace:
            (out,) = trace.call(lambda x, y: [lax.mul(x, y)], [structure.build(leaves), structure.build(leaves)])
            found.append(type(out) is structure.type)
        return []

    try:
        trace_abstractly(product, avals)
    except Exception:  # it has no such rule, or one that does not want these
        return False
    return found[0]


def _move_leaves(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind the primitive on the leaf of each operand that holds elements."""
    if not all(_leaf_holds_elements(x) for x in operands if is_value(x)):
        return NotImplemented
    results = partwise(primitive, operands, params, map_leaves, elements_of(primitive, operands))
    if results is NotImplemented:
        return NotImplemented
    for x in results if primitive.multiple_results else [results]:
        if aval_of(x).shape != jnp.shape(flatten(x)[0][0]):  # its shape is not its leaf's: it only was so by chance
            return NotImplemented
    return results


def _convert_leaf(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    if not keeps_numbers(aval_of(operands[0]).dtype, params["new_dtype"]):
        return NotImplemented
    return _move_leaves(trace, primitive, operands, params)


def _last_resort(primitive: Any, move: Callable[..., Any]) -> None:
    """Declare a treatment that comes after the simpler primitives that this one may be expressed in."""
    earlier = FALLBACKS.get(primitive)

    def both(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        results = NotImplemented if earlier is None else earlier(trace, primitive, operands, params)
        return move(trace, primitive, operands, params) if results is NotImplemented else results

    treatment(FALLBACKS, primitive)(both)


for _primitive in MOVES:
    _last_resort(_primitive, _move_leaves)
_last_resort(lax.convert_element_type_p, _convert_leaf)
