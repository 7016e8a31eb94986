"""`LoraArray`: the numbers of the dense weight, the rules that give them, derivatives, and the compiled program."""

import copy
import dataclasses
import io
import pickle
import re
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import morphax as mx
from morphax.arrays import LoraArray, QuantizedArray

M, N, RANK = 6, 4, 2
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
IDS = jnp.array([[5, 0, 3], [0, 17, -1]])  # 17 lies outside


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def lora(w, *, alpha=3.0, frozen=True):
    *batch, m, n = w.shape
    a, b = normal(1, *batch, RANK, n, dtype=w.dtype), normal(2, *batch, m, RANK, dtype=w.dtype)
    return LoraArray(w, a, b, alpha, frozen)


def int8(axis, *batch, dtype=jnp.float32):
    return QuantizedArray.quantize(normal(0, *batch, M, N, dtype=dtype), axis=axis)


VALUES = {
    "matrix": lambda dtype=jnp.float32: lora(normal(0, M, N, dtype=dtype)),
    "not frozen": lambda dtype=jnp.float32: lora(normal(0, M, N, dtype=dtype), frozen=False),
    "batch": lambda dtype=jnp.float32: lora(normal(0, 3, M, N, dtype=dtype)),
    "int8 scale per row": lambda dtype=jnp.float32: lora(int8(-1, dtype=dtype)),
    "int8 scale per column": lambda dtype=jnp.float32: lora(int8(-2, dtype=dtype)),
    "int8 batch": lambda dtype=jnp.float32: lora(int8(-1, 3, dtype=dtype)),
}

CASES = [(kind, jnp.float32) for kind in VALUES] + [
    (kind, dtype) for kind in ("matrix", "int8 scale per row") for dtype in FLOATS[1:]
]


def operand(value, rows=5):
    return normal(3, *value.shape[:-2], rows, M, dtype=value.dtype)


def assert_same(got, expected):
    """Results have the same structure, shapes, dtypes and, within rounding, numbers."""
    got = jax.tree.map(mx.materialize, got, is_leaf=lambda x: isinstance(x, mx.ArrayValue))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        tolerance = max(8 * float(jnp.finfo(jax.tree.leaves(expected)[0].dtype).eps), 1e-5)
        largest = np.max(np.abs(y), initial=1, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest)


def rules(f, *args):
    return {row.rule.split()[0] for row in mx.explain(mx.wrap(f))(*args).rows}


# ------------------------------------------------------------------------------------------------ the same numbers


FUNCTIONS = {
    "x @ w": (lambda w, x: x @ w, {"dot_general_any_lora"}),
    "w @ x": (lambda w, x: w @ x[..., :N].mT, {"dot_general_lora_any"}),
    "x @ w.mT": (lambda w, x: x[..., :N] @ w.mT, {"transpose_lora", "dot_general_any_lora"}),
    "swapaxes": (lambda w, x: jnp.swapaxes(w, -1, -2), {"transpose_lora"}),
    "w * 2": (lambda w, x: w * 2, {"mul_lora_scalar"}),
    "2 * w": (lambda w, x: 2 * w, {"mul_scalar_lora"}),
    "w / 3": (lambda w, x: w / 3, {"div_lora_scalar"}),
    "-w": (lambda w, x: -w, {"neg_lora"}),
    "stop_gradient": (lambda w, x: lax.stop_gradient(w), set()),
}


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_gives_the_numbers_of_the_dense_weight(name, kind, dtype):
    """A function of a LoRA weight gives the shape, dtype and numbers that it gives on the dense array."""
    f, _ = FUNCTIONS[name]
    value = VALUES[kind](dtype)
    x = operand(value)
    assert_same(mx.wrap(f)(value, x), f(mx.materialize(value), x))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_served_by_its_rules(name, kind):
    """The rule of each operation serves it, and nothing becomes dense."""
    f, expected = FUNCTIONS[name]
    value = VALUES[kind]()
    explanation = mx.explain(mx.wrap(f))(value, operand(value))
    assert explanation.materialized == ()
    assert {r for r in rules(f, value, operand(value)) if "lora" in r} == expected


@pytest.mark.parametrize("name", [n for n, (f, rule) in FUNCTIONS.items() if "@" not in n])
@pytest.mark.parametrize("kind", VALUES)
def test_linear_function_gives_a_lora_weight(name, kind):
    """What scales or rearranges a LoRA weight gives one of the same kind and scaling, frozen if no scalar takes part."""
    f, _ = FUNCTIONS[name]
    value = VALUES[kind]()
    out = mx.wrap(f)(value, None)
    assert (type(out), type(out.w)) == (type(value), type(value.w))
    assert (out.alpha, out.rank) == (value.alpha, value.rank)
    assert out.frozen is (value.frozen and name in ("swapaxes", "-w", "stop_gradient"))


def contractions(ndim):
    """Every way to make each axis of a weight free, summed or a batch axis; the other operand lists them in reverse."""
    for kinds in np.ndindex(*[3] * ndim):
        summed, batch = [i for i in range(ndim) if kinds[i] == 1], [i for i in range(ndim) if kinds[i] == 2]
        yield tuple(summed[::-1]), tuple(batch)


@pytest.mark.parametrize("kind", ["matrix", "batch", "int8 scale per row"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_contraction_gives_the_dense_numbers(side, kind):
    """Each choice of summed, batch and free axes is right, with either operand the weight, in each order of axes."""
    value = VALUES[kind]()

    def products(w):
        outs = []
        for summed, batch in contractions(w.ndim):
            taken = (*summed, *batch)
            y = normal(3, 5, *(value.shape[i] for i in taken[::-1]))
            of_w, of_y = (summed, batch), [tuple(1 + taken[::-1].index(i) for i in axes) for axes in (summed, batch)]
            numbers = tuple(zip(of_w, of_y, strict=True)) if side == "left" else tuple(zip(of_y, of_w, strict=True))
            outs.append(lax.dot_general(*((w, y) if side == "left" else (y, w)), numbers))
        return outs

    assert_same(jax.jit(mx.wrap(products))(value), jax.jit(products)(mx.materialize(value)))
    name = "dot_general_lora_any" if side == "left" else "dot_general_any_lora"
    rows = [row for row in mx.explain(mx.wrap(products))(value).rows if "lora" in row.rule]
    assert {row.rule.split()[0] for row in rows} == {name}
    assert sum(row.count for row in rows) == 3**value.ndim


@pytest.mark.parametrize("kind", VALUES)
def test_product_of_two_lora_weights(kind):
    """The product of two LoRA weights splits the left one, and its parts meet the right one by its own rule."""
    x, y = VALUES[kind](), VALUES[kind]()
    dot = lambda x, y: jnp.einsum("...mn,...kn->...mk", x, y)
    assert_same(mx.wrap(dot)(x, y), dot(mx.materialize(x), mx.materialize(y)))
    rows = [
        row
        for row in mx.explain(mx.wrap(dot))(x, y).rows
        if [o.split("(")[0] for o in row.operands] == ["LoraArray"] * 2
    ]
    assert [row.rule.split()[0] for row in rows] == ["dot_general_lora_any"]
    assert {"dot_general_lora_any", "dot_general_any_lora"} <= rules(dot, x, y)


@pytest.mark.parametrize("first", ["lora", "int8"])
def test_product_with_an_int8_array(first):
    """A LoRA weight times an int8 array makes neither dense, from either side."""
    x, y = lora(normal(0, M, N)), int8(-1)
    f = (lambda x, y: x @ y.T) if first == "lora" else (lambda x, y: y @ x.T)
    assert_same(mx.wrap(f)(x, y), f(mx.materialize(x), mx.materialize(y)))
    assert mx.explain(mx.wrap(f))(x, y).materialized == ()


class Halved(mx.ArrayValue):
    """Half of an array, with a rule for its product with anything."""

    double: jax.Array

    def __jax_array__(self):
        return self.double / 2


@mx.register(lax.dot_general_p)
def dot_general_halved_any(x: Halved, y: object, **params):
    return lax.dot_general(x.double, y, **params) / 2


@mx.register(lax.dot_general_p)
def dot_general_any_halved(x: object, y: Halved, **params):
    return lax.dot_general(x, y.double, **params) / 2


def test_lora_rule_goes_first_beside_a_type_that_multiplies_anything():
    """With a type whose rules take any other operand, the LoRA rule splits the product and that type's rules serve it."""
    x, y = VALUES["matrix"](), Halved(normal(3, M, N))
    dot = lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ())))
    assert_same(mx.wrap(dot)(x, y), dot(mx.materialize(x), mx.materialize(y)))
    assert_same(mx.wrap(dot)(y, x), dot(mx.materialize(y), mx.materialize(x)))
    assert {"dot_general_lora_any", "dot_general_any_halved"} == rules(dot, x, y)
    assert {"dot_general_any_lora", "dot_general_halved_any"} == rules(dot, y, x)


@pytest.mark.parametrize("kind", ["matrix", "int8 scale per row"])
def test_product_with_an_array_of_numpy(kind):
    """A LoRA weight is multiplied by arrays of NumPy as by those of JAX, also in a jitted program."""
    value = VALUES[kind]()
    x, y = np.asarray(normal(3, 5, M)), np.asarray(normal(4, N, 5))
    for f in (lambda w: x @ w, lambda w: w @ y, jax.jit(lambda w: x @ w @ y)):
        assert_same(mx.wrap(f)(value), f(mx.materialize(value)))
        assert mx.explain(mx.wrap(f))(value).materialized == ()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("axes", [((1,), (0,)), ((0,), (1,)), ((), ())])
def test_preferred_element_type_is_that_of_the_sums(axes, dtype):
    """A product asked for in float32 is summed in it throughout."""
    value, y = VALUES["matrix"](dtype), normal(3, N, M, dtype=dtype)
    w, a, b, exact_y = (np.asarray(part, np.float64) for part in (value.w, value.a, value.b, y))
    exact = np.tensordot(w + 1.5 * b @ a, exact_y, axes)
    got = mx.wrap(lambda w: lax.dot_general(w, y, (axes, ((), ())), preferred_element_type=jnp.float32))(value)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.max(np.abs(exact)))
    exact = np.tensordot(exact_y, w + 1.5 * b @ a, axes[::-1])
    got = mx.wrap(lambda w: lax.dot_general(y, w, (axes[::-1], ((), ())), preferred_element_type=jnp.float32))(value)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.max(np.abs(exact)))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", ["matrix", "not frozen", "int8 scale per row"])
@pytest.mark.parametrize(
    "lookup",
    [
        lambda w: w[IDS],
        lambda w: w[IDS[0]],
        lambda w: jnp.take(w, IDS, axis=0),
        lambda w: w.at[IDS].get(mode="clip"),
        lambda w: w.at[IDS].get(mode="fill", fill_value=5.0),
        lambda w: w.at[IDS].get(mode="fill", fill_value=0),
    ],
    ids=["2-D", "1-D", "take", "clip", "fill 5", "fill 0"],
)
def test_embedding_lookup(lookup, kind, dtype):
    """Rows are looked up without the dense table, also negative and out of range ones."""
    value = VALUES[kind](dtype)
    assert_same(jax.jit(mx.wrap(lookup))(value), jax.jit(lookup)(mx.materialize(value)))
    assert mx.explain(mx.wrap(lookup))(value).materialized == ()
    assert "gather_rows_lora" in rules(lookup, value)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)])
def test_astype_converts_the_parts(dtypes, kind):
    """A conversion to another floating type gives a LoRA weight of that type."""
    value = VALUES[kind](dtypes[0])
    f = lambda w: w.astype(dtypes[1])
    out = mx.wrap(f)(value)
    assert type(out) is LoraArray
    assert (out.w.dtype, out.a.dtype, out.b.dtype, out.frozen) == (*[dtypes[1]] * 3, value.frozen)
    got, expected = (np.asarray(x, np.float32) for x in (mx.materialize(out), f(mx.materialize(value))))
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.03 * np.max(np.abs(expected)))
    assert "convert_lora" in rules(f, value)


def test_product_in_a_wider_type_stays_a_product():
    """A bfloat16 weight times a float32 array is made in float32 from the parts."""
    value, x = VALUES["matrix"](jnp.bfloat16), normal(3, 5, M)
    explanation = mx.explain(mx.wrap(lambda w, x: x @ w))(value, x)
    assert explanation.materialized == ()
    assert mx.wrap(lambda w, x: x @ w)(value, x).dtype == jnp.float32


@pytest.mark.parametrize("name", FUNCTIONS)
def test_factors_may_be_wider_than_the_weight(name):
    """A bfloat16 weight with float32 factors is a bfloat16 array in every operation."""
    w = normal(0, M, N, dtype=jnp.bfloat16)
    value = LoraArray(w, normal(1, RANK, N), normal(2, M, RANK), 3.0)
    assert mx.materialize(value).dtype == value.dtype == jnp.bfloat16
    f, _ = FUNCTIONS[name]
    x = operand(value)
    assert_same(mx.wrap(f)(value, x), f(mx.materialize(value), x))


def test_weakly_typed_weight_gives_a_strong_type():
    """A weight made of a Python number promotes as the dense array does."""
    value = LoraArray.init(jnp.full((M, N), 0.5), RANK, key=jax.random.key(0))
    f = lambda w: w * jnp.ones((M, N), jnp.bfloat16)
    assert_same(mx.wrap(f)(value), f(mx.materialize(value)))
    assert not mx.aval_of(value).weak_type


def gather(start_index_map, slice_sizes):
    """Slices of a matrix whose first axis is left out of the result, by indices of any shape."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), start_index_map)
    indices = jnp.array([[3, 1, 0], [2, 0, 1]]).T[:, : len(start_index_map)]
    return lambda w: lax.gather(w, indices, numbers, slice_sizes)


@pytest.mark.parametrize(
    ("operation", "kind", "f"),
    [
        ("transpose", "batch", lambda w: jnp.transpose(w, (2, 1, 0))),
        ("gather", "matrix", lambda w: w[:, jnp.array([3, 0])]),
        ("gather", "matrix", lambda w: w[jnp.array([3, 0]), jnp.array([1, 2])]),
        ("gather", "batch", lambda w: w[jnp.array([2, 0])]),
        ("gather", "matrix", gather((1,), (1, N))),
        ("gather", "matrix", gather((0, 1), (1, N))),
        ("gather", "matrix", gather((0,), (1, 2))),
        ("mul", "matrix", lambda w: w * jnp.ones((M, N))),
        ("mul", "matrix", lambda w: jnp.ones((M, N)) * w),
        ("div", "matrix", lambda w: w / jnp.full((M, N), 2.0)),
        ("convert_element_type", "matrix", lambda w: w.astype(jnp.int32)),
    ],
)
def test_other_operations_make_it_dense(operation, kind, f):
    """Where a rule does not fit, that one operation runs on the dense array."""
    value = VALUES[kind]()
    assert_same_or_equal(mx.wrap(f)(value), f(mx.materialize(value)))
    assert [row.operation for row in mx.explain(mx.wrap(f))(value).materialized] == [operation]


def assert_same_or_equal(got, expected):
    if jnp.issubdtype(expected.dtype, jnp.integer):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    else:
        assert_same(got, expected)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_complex_weight():
    """A complex weight has a complex update, and its real part is not made of the parts' real parts."""
    w = normal(0, M, N) + 1j * normal(4, M, N)
    value = LoraArray(w, normal(1, RANK, N) + 1j, normal(2, M, RANK) - 1j, 3.0)
    for f in (lambda w: w.T @ jnp.ones(M), lambda w: 2j * w, lambda w: lax.convert_element_type(w, jnp.float32)):
        got, expected = mx.materialize(mx.wrap(f)(value)), f(mx.materialize(value))
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("f", [lambda w, s, x: x @ (w * s), lambda w, s, x: x @ (s * w), lambda w, s, x: x @ (w / s)])
@pytest.mark.parametrize("kind", VALUES)
def test_derivative_of_a_scalar_factor(kind, f):
    """The derivative with respect to a factor of the weight is that of the dense program, from inside and outside."""
    value = VALUES[kind]()
    x = operand(value)
    loss = lambda w, s, x: jnp.sum(jnp.sin(f(w, s, x)))
    expected = jax.grad(loss, 1)(mx.materialize(value), 2.0, x)
    np.testing.assert_allclose(jax.grad(mx.wrap(loss), 1)(value, 2.0, x), expected, rtol=1e-4)
    np.testing.assert_allclose(mx.wrap(jax.grad(loss, 1))(value, 2.0, x), expected, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ transformations


def network(w, x):
    return jnp.tanh(x @ (0.5 * w)) @ -w.mT


def loss(w, x):
    return jnp.sum(network(w, x) ** 2)


CONSTRUCTS = {
    "eager": lambda wrap, w, x: wrap(network)(w, x),
    "jit inside": lambda wrap, w, x: wrap(jax.jit(network))(w, x),
    "jit outside": lambda wrap, w, x: jax.jit(wrap(network))(w, x),
    "vmap inside": lambda wrap, w, x: wrap(jax.vmap(network, (None, 0)))(w, jnp.stack([x, 2 * x])),
    "vmap outside": lambda wrap, w, x: jax.vmap(wrap(network), (None, 0))(w, jnp.stack([x, 2 * x])),
    "grad inside": lambda wrap, w, x: wrap(jax.grad(loss, (0, 1)))(w, x),
    "grad inside jit": lambda wrap, w, x: wrap(jax.jit(jax.grad(loss, (0, 1))))(w, x),
    "grad outside": lambda wrap, w, x: jax.grad(wrap(loss), 1)(w, x),
    "jvp inside": lambda wrap, w, x: wrap(lambda w, x: jax.jvp(network, (w, x), (jnp.ones(w.shape, w.dtype), x)))(w, x),
    "jvp outside": lambda wrap, w, x: jax.jvp(lambda x: wrap(network)(w, x), (x,), (x,)),
    "vjp inside": lambda wrap, w, x: wrap(lambda w, x: jax.vjp(network, w, x)[1](x))(w, x),
    "checkpoint": lambda wrap, w, x: wrap(jax.checkpoint(network))(w, x),
    "grad of checkpoint": lambda wrap, w, x: wrap(jax.grad(jax.checkpoint(loss), (0, 1)))(w, x),
    "checkpoint outside": lambda wrap, w, x: jax.grad(jax.checkpoint(wrap(loss)), 1)(w, x),
    "vmap of grad": lambda wrap, w, x: jax.vmap(jax.grad(wrap(loss), 1), (None, 0))(w, jnp.stack([x, 2 * x])),
    "jvp of grad": lambda wrap, w, x: wrap(lambda w, x: jax.jvp(lambda x: jax.grad(loss, 1)(w, x), (x,), (x,)))(w, x),
}


@pytest.mark.parametrize("kind", ["matrix", "batch", "int8 scale per row"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_transformation_gives_the_dense_numbers(name, kind):
    """A transformed program gives on a LoRA weight what it gives on the dense array."""
    value = VALUES[kind]()
    x = 0.3 * operand(value, rows=2)
    construct = CONSTRUCTS[name]
    assert_same(construct(mx.wrap, value, x), construct(lambda f: f, mx.materialize(value), x))


@pytest.mark.parametrize("kind", ["matrix", "batch", "int8 scale per row"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_transformation_makes_nothing_dense(name, kind):
    """Rules serve a transformed program too."""
    value = VALUES[kind]()
    x = operand(value, rows=2)
    wrap = lambda f: mx.wrap(lambda *args: f(*args))  # a new function, which no jit has kept
    explanation = mx.explain(lambda w, x: CONSTRUCTS[name](wrap, w, x))(value, x)
    assert explanation.materialized == ()
    assert {"dot_general_any_lora", "transpose_lora", "neg_lora", "mul_scalar_lora"} <= {
        row.rule.split()[0] for row in explanation.rows
    }


@pytest.mark.parametrize("kind", ["batch", "int8 batch"])
@pytest.mark.parametrize("transform", [lambda f: mx.wrap(jax.vmap(f)), lambda f: jax.vmap(mx.wrap(f))])
def test_vmap_over_the_weight(transform, kind):
    """A batch of weights can be mapped over, from inside and from outside."""
    value = VALUES[kind]()
    x = operand(value)
    assert_same(transform(network)(value, x), jax.vmap(network)(mx.materialize(value), x))


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_vmap_inside_over_any_axis(axis):
    """A program can be mapped over an axis of the matrix itself."""
    value = VALUES["batch"]()
    f = lambda w, x: x @ w
    x = normal(3, *jnp.moveaxis(mx.materialize(value), axis, 0).shape[:2])
    g = jax.vmap(f, (axis, 0))
    assert_same(mx.wrap(g)(value, x), g(mx.materialize(value), x))


def test_vmap_outside_with_one_weight_for_all():
    """The factors can be mapped over alone, by a value that holds the axes of the parts."""
    w, batch = normal(0, M, N), VALUES["batch"]()
    x = operand(batch)
    axes = LoraArray(None, 0, 0, batch.alpha)
    out = jax.vmap(mx.wrap(network), (axes, 0))(dataclasses.replace(batch, w=w), x)
    expected = dataclasses.replace(batch, w=jnp.stack([w] * 3))
    assert_same(out, jax.vmap(network)(mx.materialize(expected), x))


def test_vmap_outside_gives_a_batch_of_weights():
    """A LoRA weight that a mapped function returns comes back stacked."""
    value = VALUES["batch"]()
    out = jax.vmap(mx.wrap(lambda w: w.T))(value)
    assert type(out) is LoraArray
    assert_same(out, mx.materialize(value).mT)


# ------------------------------------------------------------------------------------------------ derivatives


def by_hand(w, a, b, x, *, scaling, frozen):
    w = lax.stop_gradient(w) if frozen else w
    return jnp.sum(jnp.sin(x @ (w + scaling * b @ a)))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "f", [lambda w, x: x @ w, lambda w, x: (w.T @ x.T).T, lambda w, x: -(x @ -w), lambda w, x: x @ (w + 0)]
)
def test_gradient_of_the_parts(f, frozen):
    """The gradient of the weight is zero while it is frozen; all others are those of the program written by hand."""
    value = lora(normal(0, M, N), frozen=frozen)
    x = operand(value)
    grads = jax.grad(lambda w: jnp.sum(jnp.sin(mx.wrap(f)(w, x))))(value)
    expected = jax.grad(by_hand, (0, 1, 2))(value.w, value.a, value.b, x, scaling=1.5, frozen=frozen)
    assert type(grads) is LoraArray
    assert_same((grads.w, grads.a, grads.b), expected)
    assert bool(jnp.any(grads.w)) is not frozen


@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_of_the_parts_through_a_lookup(frozen):
    """A lookup sends the gradient to the rows of the weight, unless it is frozen, and to the factors."""
    value = lora(normal(0, M, N), frozen=frozen)
    grads = jax.grad(lambda w: jnp.sum(jnp.sin(mx.wrap(lambda w: w[IDS[0]])(w))))(value)
    hot = jax.nn.one_hot(IDS[0], M)
    expected = jax.grad(by_hand, (0, 1, 2))(value.w, value.a, value.b, hot, scaling=1.5, frozen=frozen)
    assert_same((grads.w, grads.a, grads.b), expected)


@pytest.mark.parametrize("f", [lambda w, s: w * s, lambda w, s: s * w, lambda w, s: w / s])
def test_scaled_weight_stays_frozen_to_derivatives(f):
    """The gradient of a frozen weight is zero behind a scalar factor too, and that of the factors is not."""
    value = lora(normal(0, M, N))
    grads = jax.grad(lambda w: jnp.sum(jnp.sin(mx.wrap(lambda w: jnp.ones((5, M)) @ f(w, 2.0))(w))))(value)
    assert not jnp.any(grads.w)
    assert jnp.all(grads.a != 0)
    assert jnp.all(grads.b != 0)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_inside_is_that_of_the_array(frozen):
    """A gradient taken inside is with respect to the array, which no field decides."""
    value = lora(normal(0, M, N), frozen=frozen)
    x = operand(value)
    assert_same(mx.wrap(jax.grad(loss))(value, x), jax.grad(loss)(mx.materialize(value), x))


@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_over_an_int8_weight(frozen):
    """The integers below a LoRA weight have no gradient, and their scale has one unless the weight is frozen."""
    value = lora(int8(-1), frozen=frozen)
    x = operand(value)
    grads = jax.grad(lambda w: mx.wrap(loss)(w, x), allow_int=True)(value)
    assert grads.w.qvalue.dtype == jax.dtypes.float0

    def with_parts(scale, a, b):
        w = lax.stop_gradient(scale) if frozen else scale
        return loss(value.w.qvalue * w + 1.5 * b @ a, x)

    assert_same((grads.w.scale, grads.a, grads.b), jax.grad(with_parts, (0, 1, 2))(value.w.scale, value.a, value.b))


@pytest.mark.parametrize("over_int8", [False, True])
def test_filter_grad_of_a_model(over_int8):
    """Equinox differentiates a model whose weight is a LoRA weight, with respect to the factors."""
    model = eqx.nn.Linear(M, N, key=jax.random.key(0))
    w = QuantizedArray.quantize(model.weight) if over_int8 else model.weight
    model = eqx.tree_at(lambda m: m.weight, model, lora(w))
    x = normal(3, 5, M)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        return jnp.sum(jnp.sin(mx.wrap(lambda m, x: jax.vmap(m)(x))(model, x)))

    grads = gradient(model)

    def with_factors(a, b, bias):
        return jnp.sum(jnp.sin(x @ (mx.materialize(w) + 1.5 * b @ a).T + bias))

    expected = jax.grad(with_factors, (0, 1, 2))(model.weight.a, model.weight.b, model.bias)
    assert_same((grads.weight.a, grads.weight.b, grads.bias), expected)
    assert not jnp.any(grads.weight.w.scale if over_int8 else grads.weight.w)
    assert not over_int8 or grads.weight.w.qvalue is None


def test_gradient_of_the_dense_array():
    """The gradient through `materialize` is that of the formula, with the weight frozen."""
    value = lora(normal(0, M, N))
    grads = jax.grad(lambda w: jnp.sum(jnp.sin(mx.materialize(w))))(value)
    expected = jax.grad(by_hand, (0, 1, 2))(value.w, value.a, value.b, jnp.eye(M), scaling=1.5, frozen=True)
    assert_same((grads.w, grads.a, grads.b), expected)


# ------------------------------------------------------------------------------------------------ making one


@pytest.mark.parametrize("shape", [(M, N), (2, 3, M, N)])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_update_is_zero_at_the_start(dtype, shape):
    """A new LoRA weight is its weight, with factors of the shapes that the rank gives."""
    w = normal(0, *shape, dtype=dtype)
    value = LoraArray.init(w, 3, key=jax.random.key(1))
    assert (value.a.shape, value.b.shape) == ((*shape[:-2], 3, N), (*shape[:-2], M, 3))
    assert (value.a.dtype, value.b.dtype, value.dtype, value.shape) == (dtype, dtype, dtype, shape)
    assert not jnp.any(value.b)
    assert (value.alpha, value.rank, value.scaling, value.frozen) == (3.0, 3, 1.0, True)
    np.testing.assert_array_equal(mx.materialize(value), w)


@pytest.mark.parametrize(("alpha", "scaling"), [(None, 1.0), (8, 4.0), (1.0, 0.5), (0, 0.0)])
def test_scaling_is_alpha_over_rank(alpha, scaling):
    """The update is scaled by alpha over the rank."""
    value = LoraArray.init(normal(0, M, N), 2, key=jax.random.key(1), alpha=alpha)
    value = dataclasses.replace(value, b=normal(2, M, 2))
    assert value.scaling == scaling
    assert_same(mx.materialize(value), value.w + scaling * value.b @ value.a)


def test_variance_of_the_first_factor():
    """The elements of the first factor have mean 0 and variance 1 / n."""
    a = LoraArray.init(jnp.zeros((256, 400)), 256, key=jax.random.key(0)).a
    assert abs(float(jnp.mean(a))) < 1e-3
    np.testing.assert_allclose(float(jnp.var(a)), 1 / 400, rtol=0.02)


@pytest.mark.parametrize("rank", [1, N, np.int64(2)])
def test_rank_may_be_any_integer_that_fits(rank):
    """The rank may be 1, the smaller side of the weight, or an integer of NumPy."""
    assert LoraArray.init(normal(0, M, N), rank, key=jax.random.key(0)).rank == rank


def test_weight_of_numpy():
    """A weight in NumPy's float64 gives factors in JAX's own dtype."""
    value = LoraArray.init(np.ones((M, N)), 2, key=jax.random.key(0))
    assert value.dtype == value.a.dtype == jnp.zeros(()).dtype
    assert_same(mx.wrap(lambda w, x: x @ w)(value, jnp.ones((5, M))), M * jnp.ones((5, N)))


def test_init_over_an_int8_weight():
    """An int8 weight stays int8 below the update."""
    w = int8(-1)
    value = LoraArray.init(w, 2, key=jax.random.key(0), frozen=False)
    assert value.w is w
    assert value.dtype == jnp.float32
    assert not value.frozen


def test_init_traces():
    """A LoRA weight can be made under jit and vmap."""
    w, keys = normal(0, 3, M, N), jax.random.split(jax.random.key(1), 3)
    made = jax.jit(jax.vmap(lambda w, key: LoraArray.init(w, 2, key=key)))(w, keys)
    assert (made.shape, made.a.shape) == ((3, M, N), (3, 2, N))


@pytest.mark.parametrize(
    ("w", "rank", "error", "message"),
    [
        (jnp.ones((6, 4)), 0, ValueError, "`rank` must lie between 1 and 4 for a weight of shape (6, 4), got 0."),
        (jnp.ones((6, 4)), -1, ValueError, "`rank` must lie between 1 and 4 for a weight of shape (6, 4), got -1."),
        (jnp.ones((6, 4)), 5, ValueError, "`rank` must lie between 1 and 4 for a weight of shape (6, 4), got 5."),
        (jnp.ones((9, 2, 3)), 3, ValueError, "`rank` must lie between 1 and 2 for a weight of shape (9, 2, 3), got 3."),
        (jnp.ones((6, 4)), True, TypeError, "`rank` must be an integer, got True."),
        (jnp.ones((6, 4)), 2.0, TypeError, "`rank` must be an integer, got 2.0."),
        (jnp.ones((6, 4)), None, TypeError, "`rank` must be an integer, got None."),
        (
            jnp.ones(6),
            1,
            ValueError,
            "a LoRA update is a product of two matrices, and `w` has shape (6,): it needs two dimensions.",
        ),
        (
            jnp.float32(1),
            1,
            ValueError,
            "a LoRA update is a product of two matrices, and `w` has shape (): it needs two dimensions.",
        ),
        (
            jnp.ones((6, 4), jnp.int8),
            1,
            TypeError,
            "`w` has dtype int8; an update needs a floating weight (quantize it with `QuantizedArray`).",
        ),
        (
            jnp.ones((6, 4), bool),
            1,
            TypeError,
            "`w` has dtype bool; an update needs a floating weight (quantize it with `QuantizedArray`).",
        ),
    ],
)
def test_what_init_refuses(w, rank, error, message):
    """A rank or a weight that does not do is refused with the reason."""
    with pytest.raises(error) as raised:
        LoraArray.init(w, rank, key=jax.random.key(0))
    assert str(raised.value) == message


def test_is_immutable():
    """A field cannot be set; `dataclasses.replace` gives a new value."""
    value = VALUES["matrix"]()
    with pytest.raises(dataclasses.FrozenInstanceError) as raised:
        value.alpha = 2.0
    assert str(raised.value) == (
        "cannot set 'alpha' of a `LoraArray`: values are immutable. Use `dataclasses.replace(x, alpha=...)`."
    )
    assert dataclasses.replace(value, alpha=2.0).alpha == 2.0


def test_is_a_pytree_of_its_arrays():
    """The arrays are leaves with names, and alpha and the state of being frozen are part of the structure."""
    value = VALUES["int8 scale per row"]()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    assert paths == [".w.qvalue", ".w.scale", ".a", ".b"]
    assert jax.tree.structure(value) != jax.tree.structure(dataclasses.replace(value, alpha=1.0))
    assert jax.tree.structure(value) != jax.tree.structure(dataclasses.replace(value, frozen=False))


def serialised(value):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, value)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, jax.tree.map(jnp.zeros_like, value))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    "through",
    [
        lambda v: pickle.loads(pickle.dumps(v)),
        copy.copy,
        copy.deepcopy,
        lambda v: jax.tree.map(lambda x: x, v),
        serialised,
    ],
    ids=["pickle", "copy", "deepcopy", "tree_map", "equinox"],
)
def test_survives(through, kind):
    """A value comes back from each way of storing or copying it as it was."""
    value = VALUES[kind]()
    back = through(value)
    assert back is not value
    assert jax.tree.structure(back) == jax.tree.structure(value)
    jax.tree.map(np.testing.assert_array_equal, back, value)


# ------------------------------------------------------------------------------------------------ programs


def operations(compiled):
    return Counter(re.findall(r"^\s*(?:ROOT )?\S+ = \S+ ([\w-]+)\(", compiled.as_text(), re.MULTILINE))


def assert_same_program(f, g, value, parts, x):
    compiled = jax.jit(mx.wrap(f)).lower(value, x).compile()
    expected = jax.jit(g).lower(*parts, x).compile()
    assert compiled.cost_analysis()["flops"] == expected.cost_analysis()["flops"] > 0
    assert operations(compiled) == operations(expected) != Counter()


def test_compiled_program_is_that_written_by_hand():
    """The compiled product has the operations and flops of the formula written out."""
    value = VALUES["matrix"]()
    by_hand = lambda w, a, b, x: x @ w + 1.5 * ((x @ b) @ a)
    assert_same_program(lambda w, x: x @ w, by_hand, value, (value.w, value.a, value.b), operand(value))


def test_compiled_program_over_int8_is_that_written_by_hand():
    """The compiled product over an int8 weight has the operations and flops of the formula written out."""
    value = VALUES["int8 scale per column"]()
    by_hand = lambda q, s, a, b, x: (x @ q.astype(jnp.float32)) * s + 1.5 * ((x @ b) @ a)
    parts = (value.w.qvalue, value.w.scale, value.a, value.b)
    assert_same_program(lambda w, x: x @ w, by_hand, value, parts, operand(value))


def test_compiled_gradient_is_that_written_by_hand():
    """The compiled gradient of the factors has the operations and flops of the formula written out."""
    value = VALUES["matrix"]()
    with_factors = lambda w, a, b, x: jax.grad(lambda a, b: jnp.sum((x @ w + 1.5 * ((x @ b) @ a)) ** 2), (0, 1))(a, b)

    def gradient(w, x):
        grads = jax.grad(lambda w: jnp.sum(mx.wrap(lambda w, x: x @ w)(w, x) ** 2))(w)
        return grads.a, grads.b

    compiled = jax.jit(gradient).lower(value, operand(value)).compile()
    expected = jax.jit(with_factors).lower(value.w, value.a, value.b, operand(value)).compile()
    assert compiled.cost_analysis()["flops"] == expected.cost_analysis()["flops"] > 0
    assert operations(compiled) == operations(expected) != Counter()


@pytest.mark.parametrize("kind", VALUES)
def test_update_is_never_multiplied_out(kind):
    """No intermediate of the product has the shape of the weight, but for the weight itself."""
    value = VALUES[kind]()
    jaxpr = jax.make_jaxpr(mx.wrap(lambda w, x: x @ w))(value, operand(value))
    shapes = [(eqn.primitive.name, v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    assert {name for name, shape in shapes if shape == value.shape} <= {"stop_gradient", "convert_element_type"}


@pytest.mark.parametrize("kind", VALUES)
def test_second_call_does_not_trace(kind):
    """A jitted wrapped function is traced once for values of one structure."""
    value = VALUES[kind]()
    traces = []

    def f(w, x):
        traces.append(None)
        return x @ w

    g = jax.jit(mx.wrap(f))
    g(value, operand(value))
    g(jax.tree.map(lambda x: x + x, value), operand(value))
    assert len(traces) == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", [("i", None), (None, "i")])
def test_sharding_asked_of_a_product(spec, side):
    """A sharding asked of the result is that of the result, and the rank is not sharded."""
    value, x = LoraArray(jnp.ones((8, N)), jnp.ones((3, N)), jnp.ones((8, 3))), jnp.ones((M, 8))
    numbers = ((0,), (1,)) if side == "left" else ((1,), (0,))

    def f(w, x):
        operands = (w, x) if side == "left" else (x, w)
        return lax.dot_general(*operands, (numbers, ((), ())), out_sharding=PartitionSpec(*spec))

    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert jax.eval_shape(mx.wrap(f), value, x).sharding.spec == PartitionSpec(*spec)
        assert mx.explain(mx.wrap(f))(value, x).materialized == ()


def test_sharding_asked_of_another_contraction():
    """A contraction that is not along one axis of the matrix leaves the sharding to the dense program."""
    value, x = VALUES["matrix"](), jnp.ones(3)
    f = lambda w, x: lax.dot_general(w, x, (((), ()), ((), ())), out_sharding=PartitionSpec("i", None, None))
    g = lambda w, x: lax.dot_general(x, w, (((), ()), ((), ())), out_sharding=PartitionSpec(None, "i", None))
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("i",), axis_types=(AxisType.Explicit,))):
        assert jax.eval_shape(mx.wrap(f), value, x).sharding.spec == PartitionSpec("i", None, None)
        assert jax.eval_shape(mx.wrap(g), value, x).sharding.spec == PartitionSpec(None, "i", None)
        both = lambda w: lax.dot_general(w, w, (((), ()), ((), ())), out_sharding=PartitionSpec("i", None, None, None))
        assert jax.eval_shape(mx.wrap(both), value).sharding.spec == PartitionSpec("i", None, None, None)
        for h in (f, g):
            assert [row.operation for row in mx.explain(mx.wrap(h))(value, x).materialized] == ["dot_general"]
