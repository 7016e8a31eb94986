"""The families and the table of neutral parameters, against the primitives that this JAX has."""

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import pytest
from jax import lax

from morphax import primitives

X = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)
I = jnp.array([0, 1])

# Parameters that say what a primitive computes. A rule that leaves one of them out is wrong.
MEANINGFUL = {
    "axes", "axis", "axis_index_groups", "broadcast_dimensions", "conjugate_a", "dimension", "dimension_numbers", "dimensions",
    "dtype", "end_index", "exponent_bits", "fft_lengths", "fft_type", "fill_value", "fresh_axes", "index_dtype", "is_high",
    "jaxpr", "k", "left_side", "limit_indices", "lower", "mantissa_bits", "mode", "new_dtype", "new_sizes", "num_keys", "operand",
    "padding", "padding_config", "permutation", "preferred_element_type", "reps", "rounding_method", "shape", "sizes", "slice_sizes",
    "start_indices", "strides", "symmetrize_input", "transpose_a", "unit_diagonal", "update_consts", "update_jaxpr", "window_dimensions",
    "window_strides", "y", "sort_eigenvalues", "subset_by_index", "compute_uv", "full_matrices", "algorithm", "pivoting", "use_magma",
    "base_dilation", "window_dilation", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count", "reverse", "weak_type",
    "sharding", "out_sharding", "result_accuracy", "implementation", "compute_left_eigenvectors", "compute_right_eigenvectors",
    "unique_indices", "indices_are_sorted", "accuracy", "precision", "is_stable", "copy", "out_dtype", "recall_target", "pad_type",
}  # fmt: skip


def _programs():
    yield from (
        lambda f=f: jax.make_jaxpr(f)(X)
        for f in (
            lambda x: (x + x) * x - x / x,
            lambda x: jnp.maximum(x, 1 - x) ** x,
            jnp.sin,
            jnp.exp,
            jnp.tanh,
            lax.rsqrt,
            lax.square,
            lax.logistic,
            lax.erf,
            lambda x: x**2,
            lambda x: lax.reduce_precision(x, 5, 5),
            jnp.round,
            lambda x: x.astype(jnp.float16),
            lambda x: jnp.sum(x, 0),
            lambda x: jnp.max(x, 1),
            jnp.argmax,
            lambda x: jnp.cumsum(x, 0),
            lambda x: lax.cumlogsumexp(x, 0),
            lambda x: x.T,
            lambda x: x.reshape(3, 2),
            lambda x: x[::-1],
            lambda x: x[0],
            lambda x: x[I],
            lambda x: jnp.broadcast_to(x, (4, 2, 3)),
            lambda x: jnp.concatenate([x, x]),
            lambda x: jnp.pad(x, 1),
            lambda x: jnp.split(x, 3, 1),
            lambda x: jnp.stack([x, x]),
            lambda x: jnp.tile(x, 2),
            lambda x: lax.dynamic_slice(x, (0, 0), (1, 1)),
            lambda x: x.at[0].set(1.0),
            lambda x: x.at[I].add(1.0),
            lambda x: x @ x.T,
            lambda x: jnp.sort(x),
            lambda x: lax.top_k(x, 2),
            lambda x: jnp.linalg.cholesky(x @ x.T),
            lambda x: jnp.linalg.eigh(x @ x.T),
            lambda x: jnp.linalg.svd(x),
            lambda x: jnp.linalg.qr(x),
            lambda x: jnp.fft.fft(x),
            lambda x: lax.conv_general_dilated(x[None, None], x[None, None], (1, 1), "SAME"),
            lambda x: lax.clamp(0.1, x, 0.2),
            lambda x: jnp.where(x > 0, x, 0),
            lambda x: jax.scipy.linalg.solve_triangular(x @ x.T, x),
            lambda x: lax.iota(jnp.int32, 3),
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"),
        )
    )


def test_every_parameter_is_known():
    """A parameter that a new JAX adds shows up here, to be called neutral or meaningful."""
    unknown = set()
    for program in _programs():
        for eqn in _equations(program().jaxpr):
            unknown |= {
                (eqn.primitive.name, p) for p in eqn.params if p not in MEANINGFUL and p not in primitives.NEUTRAL
            }
    assert not unknown


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name == "jit" else None
        if inner is None:
            yield eqn
        else:
            yield from _equations(inner.jaxpr)


def test_neutral_values():
    """What a rule may leave out, and what it may not."""
    neutral = primitives.is_neutral
    assert neutral("out_sharding", None, [])
    assert neutral("accuracy", object(), [])
    assert neutral("reverse", False, [])
    assert not neutral("reverse", True, [])
    assert neutral("lhs_dilation", (1, 1), [])
    assert not neutral("lhs_dilation", (1, 2), [])
    assert neutral("preferred_element_type", jnp.float32, [X, X])
    assert not neutral("preferred_element_type", jnp.float16, [X, X])
    assert not neutral("feature_group_count", 2, [])
    assert neutral("mode", lax.GatherScatterMode.FILL_OR_DROP, [])
    assert not neutral("mode", lax.GatherScatterMode.CLIP, [])
    assert not neutral("dimension_numbers", ((), ()), [])


def test_families_hold_primitives_and_do_not_overlap():
    """Each primitive has one kind."""
    families = [
        primitives.UNARY, primitives.BINARY, primitives.COMPARISONS, primitives.STRUCTURAL, primitives.REDUCTIONS,
        primitives.CUMULATIVE, primitives.CONTRACTIONS, primitives.SCATTERS, primitives.SORTS, primitives.WINDOWS,
        primitives.LINALG, primitives.COLLECTIVES, primitives.IDENTITIES,
    ]  # fmt: skip
    everything = [p for family in families for p in family]
    assert len(everything) == len(set(everything))
    assert set(primitives.UNARY) < set(primitives.ELEMENTWISE)
    assert lax.sin_p in primitives.UNARY
    assert lax.dot_general_p in primitives.CONTRACTIONS


# The primitives in no family, with the reason why a rule for many of them at once would say nothing.
IN_NO_FAMILY = {
    "they hold functions, and the rules inside those are what serves a value": {
        "call", "call_hi_primitive", "closed_call", "cond", "custom_jvp_call", "custom_lin", "custom_vjp_call", "eval_jaxpr", "jit",
        "reduce", "remat2", "scan", "while",
    },
    "they draw random bits, from keys": {
        "random_bits", "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap", "random_wrap",
        "rng_bit_generator", "rng_uniform", "threefry2x32",
    },
    "they have no operand that could be a value": {"axis_index", "create_token", "empty", "empty2", "iota", "platform_index"},
    "they read and write memory": {"get", "swap"},
    "they order or keep computations": {"after_all", "dce_sink"},
    "they say where an array lies, and are done leaf by leaf": {"device_put", "sharding_constraint"},
    "the sum of cotangents is tried as `add`": {"add_any"},
    "each is of a kind of its own": {"bitcast_convert_type", "fft", "scaled_dot"},
}  # fmt: skip


def _exported():
    """The primitives that JAX names."""
    for module in (lax, lax.linalg, jax.extend.core.primitives):
        yield from (x for x in vars(module).values() if isinstance(x, jax.extend.core.Primitive))


def _met():
    """The primitives met by tracing each function of these namespaces on operands of a few kinds."""
    square, numbers = jnp.eye(3) + 0.1, jnp.arange(9).reshape(3, 3)
    operands = [
        (square,),
        (square, square),
        (square, square, square),
        (numbers, numbers),
        (square[0],),
        ([square, square],),
    ]
    for module in (jnp, jnp.linalg, jnp.fft, lax, lax.linalg, jax.nn, jax.scipy.linalg, jax.scipy.special):
        for name, function in vars(module).items():
            if name.startswith("_") or isinstance(function, type) or not callable(function):
                continue
            for xs in operands:
                try:
                    program = jax.make_jaxpr(function)(*xs)
                except Exception:  # it wants other operands
                    continue
                yield from _primitives_in(program.jaxpr)


def _primitives_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive
        for param in eqn.params.values():
            for inner in param if isinstance(param, (tuple, list)) else [param]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _primitives_in(inner)


def _families():
    return {name: family for name, family in vars(primitives).items() if name.isupper() and isinstance(family, tuple)}


@pytest.mark.filterwarnings("ignore")  # of deprecated names
def test_every_primitive_is_in_a_family_or_has_a_reason():
    """A primitive that a new JAX adds shows up here."""
    in_families = {p for family in _families().values() for p in family}
    found = {*_exported(), *_met()}
    assert len(found) > 170
    reasoned = {name for names in IN_NO_FAMILY.values() for name in names}
    assert sorted({p.name for p in found if p not in in_families} - reasoned) == []
    assert sorted({p.name for p in in_families} & reasoned) == []
