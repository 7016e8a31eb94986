"""Names for the usual families of JAX's primitives, and the parameters that a rule may leave out.

A rule for a family serves every primitive in it:

    @mx.register(*mx.primitives.REDUCTIONS)
    def reduce_masked(x: Masked, *, primitive, axes, **params): ...
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core.primitives as _extended
from jax import lax

from . import _jax


def _family(names: str) -> tuple[Any, ...]:
    """Look primitives up by name, leaving out those that this JAX does not have."""
    return tuple(p for name in names.split() if (p := _primitive(f"{name}_p")) is not None)


def _primitive(name: str) -> Any:
    return getattr(lax, name, None) or getattr(_extended, name, None) or _jax.unexported_primitive(name)


UNARY = _family(
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 floor imag integer_pow is_finite lgamma log log1p log2 logistic neg not one_minus_square population_count real "
    "reduce_precision round rsqrt sign sin sinh sqrt square tan tanh"
)
"""Elementwise functions of one operand."""

BINARY = _family(
    "add atan2 complex div igamma igamma_grad_a igammac max min mul mulhi nextafter polygamma pow rem shift_left "
    "shift_right_arithmetic shift_right_logical sub xor and or zeta"
)
"""Elementwise functions of two operands of one shape (a scalar literal may stand for either)."""

COMPARISONS = _family("eq ne lt le gt ge eq_to le_to lt_to")
"""Elementwise comparisons: the result is boolean."""

ELEMENTWISE = (
    *UNARY,
    *BINARY,
    *COMPARISONS,
    *_family("clamp select_n polynomial regularized_incomplete_beta convert_element_type"),
)
"""All elementwise primitives, with those of several operands."""

STRUCTURAL = _family(
    "broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather pad reshape rev slice split squeeze stack tile "
    "transpose unstack"
)
"""Primitives that move elements and compute nothing."""

REDUCTIONS = _family("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
"""Reductions over the parameter ``axes``."""

CUMULATIVE = _family("cumlogsumexp cummax cummin cumprod cumsum")
"""Running reductions along the parameter ``axis``."""

CONTRACTIONS = _family("conv_general_dilated dot_general")
"""Bilinear contractions of two operands."""

SCATTERS = _family("scatter scatter_add scatter_max scatter_min scatter_mul scatter_sub")
"""Indexed updates."""

SORTS = _family("approx_top_k sort top_k")
"""Orderings along a dimension."""

WINDOWS = _family(
    "reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter "
    "select_and_scatter_add"
)
"""Reductions over windows, and what their derivatives need."""

LINALG = _family(
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product linear_solve lu lu_pivots_to_permutation "
    "ormqr qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve"
)
"""Matrix decompositions with their steps, and solvers."""

COLLECTIVES = _family(
    "all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pmax pmin ppermute preduced psum "
    "psum_invariant ragged_all_to_all reduce_scatter unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter "
    "vary_unreduced_cast"
)
"""Communication along a named axis."""

IDENTITIES = tuple(
    p
    for p in (
        _jax.copy_p,
        _jax.stop_gradient_p,
        _jax.optimization_barrier_p,
        _jax.pvary_p,
        _jax.xla_metadata_value_p,
        *_family("name stage"),
    )
    if p is not None
)
"""Primitives that leave the data as it is: they act on each leaf of a value."""


# ------------------------------------------------------------------------------------------------ neutral parameters


def _anything(_: Any, __: Sequence[Any]) -> bool:
    return True


def _equal(*neutral: Any) -> Callable[[Any, Sequence[Any]], bool]:
    return lambda x, _: any(x is n or (type(x) is type(n) and x == n) for n in neutral)


def _ones(x: Any, _: Sequence[Any]) -> bool:
    return all(d == 1 for d in x)


def _result_type(x: Any, operands: Sequence[Any]) -> bool:
    return x == lax.dtype(lax.convert_element_type(0, _promoted(operands)))


def _promoted(operands: Sequence[Any]) -> Any:
    import jax.numpy as jnp

    return jnp.result_type(*(x.dtype if hasattr(x, "dtype") else x for x in operands))


def _default_mode(x: Any, _: Sequence[Any]) -> bool:
    return x in (lax.GatherScatterMode.PROMISE_IN_BOUNDS, lax.GatherScatterMode.FILL_OR_DROP)


NEUTRAL: dict[str, Callable[[Any, Sequence[Any]], bool]] = {
    # Hints for the compiler: the result is the same whatever they say.
    "accuracy": _anything,
    "precision": _anything,
    "indices_are_sorted": _anything,
    "unique_indices": _anything,
    "split_transpose": _anything,
    "is_stable": _equal(True),
    # Refinements whose neutral value asks for nothing.
    "mode": _default_mode,
    "reverse": _equal(False),
    "weak_type": _equal(False),
    "wrap_negative_indices": _equal(False),
    "lhs_dilation": _ones,
    "rhs_dilation": _ones,
    "base_dilation": _ones,
    "window_dilation": _ones,
    "feature_group_count": _equal(1),
    "batch_group_count": _equal(1),
    "strides": _ones,
    "axes": lambda x, _: x == (),
    "preferred_element_type": _result_type,
}
"""Per parameter the test of whether a rule that does not name it may run: ``test(x, operands)``. None is always neutral."""


def is_neutral(name: str, x: Any, operands: Sequence[Any]) -> bool:
    """Whether a parameter's value changes nothing, so that a rule which does not name the parameter is right."""
    if x is None:
        return True
    test = NEUTRAL.get(name)
    return test is not None and test(x, operands)
