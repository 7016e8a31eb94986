"""Moving the elements of a value that refuses to become an array: a last resort before the error.

A type that has a rule for the product of two of its values, and one leaf of the array's shape and dtype, is taken for one
whose leaf holds the array's elements, such as a quantity with a unit. Moving elements of the leaf is then moving elements of the
array, and without it every such type would need a rule for each of some twenty primitives. Nothing is assumed of a type that
can say what its array is: it is made dense. A leaf of the right shape alone would prove too little (the inverse of a matrix that
is kept as that matrix), but such a type has no products element by element.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._differentiation import is_leafwise, meaning
from .._parts import map_leaves
from .._partwise import MOVES, elements_of, keeps_numbers, partwise
from .._registry import registry
from .._trace import FALLBACKS, DispatchTrace, treatment
from .._value import aval_of, flatten, is_value
from ..errors import AmbiguousRuleError


def _leaf_holds_elements(x: Any) -> bool:
    leaves, structure = flatten(x)
    avals = [_jax.typeof(leaf) for leaf in leaves]
    if structure is None or len(leaves) != 1 or not meaning(structure, avals).refuses:
        return False
    return is_leafwise(structure, avals) and avals[0].dtype == aval_of(x).dtype and _multiplies(x)


def _multiplies(x: Any) -> bool:
    try:
        return registry.find(lax.mul_p, [x, x]) is not None
    except AmbiguousRuleError:
        return False


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
