"""`QuantizedArray`: the numbers of the dense array, the rules that give them, rounding, derivatives, and the program."""

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

import morphax as mx
from morphax.arrays import QuantizedArray

M, N = 6, 4
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
IDS = jnp.array([[5, 0, 3], [0, 17, -1]])  # 17 lies outside


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def int8(axis, *batch, dtype=jnp.float32):
    return QuantizedArray.quantize(normal(0, *batch, M, N, dtype=dtype), axis=axis)


VALUES = {
    "scale per row": lambda dtype=jnp.float32: int8(-1, dtype=dtype),
    "scale per column": lambda dtype=jnp.float32: int8(-2, dtype=dtype),
    "one scale": lambda dtype=jnp.float32: int8((-1, -2), dtype=dtype),
    "scale per element": lambda dtype=jnp.float32: int8((), dtype=dtype),
    "batch, scale per row": lambda dtype=jnp.float32: int8(-1, 3, dtype=dtype),
    "batch, scale per column": lambda dtype=jnp.float32: int8((0, 1), 3, dtype=dtype),
    "batch, shared scales": lambda dtype=jnp.float32: int8(0, 3, dtype=dtype),
}
CASES = [(kind, jnp.float32) for kind in VALUES] + [
    (kind, dtype) for kind in ("scale per row", "batch, scale per column") for dtype in FLOATS[1:]
]
SERVED = [
    kind for kind in VALUES if kind not in ("scale per element", "batch, shared scales")
]  # products along one axis


def operand(value, rows=5):
    return normal(3, *value.shape[:-2], rows, M, dtype=value.dtype)


def assert_same(got, expected):
    """Results have the same structure, shapes, dtypes and, within rounding, numbers."""
    got = jax.tree.map(mx.materialize, got, is_leaf=lambda x: isinstance(x, mx.ArrayValue))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
        tolerance = max(8 * float(jnp.finfo(y.dtype).eps), 1e-5) if jnp.issubdtype(y.dtype, jnp.floating) else 0
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        largest = np.max(np.abs(y), initial=1, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest)


def rules(f, *args):
    return {row.rule.split()[0] for row in mx.explain(mx.wrap(f))(*args).rows}


def densified(f, *args):
    return [row.operation for row in mx.explain(mx.wrap(f))(*args).materialized]


# ------------------------------------------------------------------------------------------------ the same numbers


PRODUCTS = {
    "x @ w": (lambda w, x: x @ w, "dot_general_array_quantized"),
    "w @ x": (lambda w, x: w @ x[..., :N].mT, "dot_general_quantized_array"),
    "x @ w.mT": (lambda w, x: x[..., :N] @ w.mT, "dot_general_array_quantized"),
    "w.mT @ x": (lambda w, x: w.mT @ x.mT, "dot_general_quantized_array"),
}
LINEAR = {
    "transpose": (lambda w, x: jnp.transpose(w, range(w.ndim)[::-1]), "transpose_quantized"),
    "swapaxes": (lambda w, x: jnp.swapaxes(w, -1, -2), "transpose_quantized"),
    "mT": (lambda w, x: w.mT, "transpose_quantized"),
    "w * 2": (lambda w, x: w * 2, "mul_quantized_scalar"),
    "2 * w": (lambda w, x: 2 * w, "mul_scalar_quantized"),
    "w / 3": (lambda w, x: w / 3, "div_quantized_scalar"),
    "-w": (lambda w, x: -w, "neg_quantized"),
    "stop_gradient": (lambda w, x: lax.stop_gradient(w), None),
}
FUNCTIONS = {**PRODUCTS, **LINEAR}


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_gives_the_numbers_of_the_dense_array(name, kind, dtype):
    """A function of an int8 array gives the shape, dtype and numbers that it gives on the dense array."""
    f, _ = FUNCTIONS[name]
    value = VALUES[kind](dtype)
    x = operand(value)
    assert_same(mx.wrap(f)(value, x), f(mx.materialize(value), x))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_function_gives_an_int8_array(name, kind):
    """What scales or rearranges an int8 array gives one, by the rule of the operation."""
    f, rule = LINEAR[name]
    value = VALUES[kind]()
    out = mx.wrap(f)(value, None)
    assert (type(out), out.qvalue.dtype, out.dtype) == (QuantizedArray, jnp.int8, jnp.float32)
    assert densified(f, value, None) == []
    assert {r for r in rules(f, value, None) if "quantized" in r} == {rule} - {None}


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_is_served_by_its_rule(name, kind):
    """A product along one axis uses the integers, wherever the scale varies along one axis only."""
    f, rule = PRODUCTS[name]
    value = VALUES[kind]()
    assert densified(f, value, operand(value)) == []
    assert rule in rules(f, value, operand(value))


@pytest.mark.parametrize("kind", ["scale per element", "batch, shared scales"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_is_dense_where_the_scale_varies_everywhere(name, kind):
    """A scale that varies along the summed and along a free axis can be taken to no side, so the array becomes dense."""
    f, rule = PRODUCTS[name]
    value = VALUES[kind]()
    assert densified(f, value, operand(value)) == ["dot_general"]
    assert rule not in rules(f, value, operand(value))


def contractions(ndim):
    """Every way to make each axis of an array free, summed or a batch axis; the other operand lists them in reverse."""
    for kinds in np.ndindex(*[3] * ndim):
        summed, batch = [i for i in range(ndim) if kinds[i] == 1], [i for i in range(ndim) if kinds[i] == 2]
        yield tuple(summed[::-1]), tuple(batch)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_contraction(side, kind):
    """Each choice of summed, batch and free axes is right on either side, and served wherever the scale allows it."""
    value = VALUES[kind]()
    operands = [normal(3, 5, *(value.shape[i] for i in (*s, *b)[::-1])) for s, b in contractions(value.ndim)]

    def products(w):
        outs = []
        for y, (summed, batch) in zip(operands, contractions(w.ndim), strict=True):
            taken = (*summed, *batch)[::-1]
            of_w, of_y = (summed, batch), [tuple(1 + taken.index(i) for i in axes) for axes in (summed, batch)]
            pairs = zip(of_w, of_y, strict=True) if side == "left" else zip(of_y, of_w, strict=True)
            outs.append(lax.dot_general(*((w, y) if side == "left" else (y, w)), tuple(pairs)))
        return outs

    assert_same(jax.jit(mx.wrap(products))(value), jax.jit(products)(mx.materialize(value)))
    varying = {i for i in range(value.ndim) if not value.is_shared(i)}
    free = [set(range(value.ndim)) - {*summed, *batch} for summed, batch in contractions(value.ndim)]
    fits = [not varying & {*s} or not varying & f for (s, _), f in zip(contractions(value.ndim), free, strict=True)]
    rows = mx.explain(mx.wrap(products))(value).rows
    rule = "dot_general_quantized_array" if side == "left" else "dot_general_array_quantized"
    assert sum(row.count for row in rows if row.rule.startswith(rule)) == sum(fits)
    assert sum(row.count for row in rows if row.rule == "materialized") == len(fits) - sum(fits)


@pytest.mark.parametrize("kind", SERVED[:3])
@pytest.mark.parametrize("other", [jnp.int8, jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
def test_product_with_an_operand_of_another_dtype(other, kind):
    """`lax.dot_general` takes operands of two dtypes, and the product has the numbers of the dense array's."""
    value = VALUES[kind](jnp.float32 if other is not jnp.float32 else jnp.bfloat16)
    y = jnp.asarray(normal(3, N, M) * 3, other)
    for numbers in ((((0,), (1,)), ((), ())), (((1,), (0,)), ((), ()))):
        f = lambda w: lax.dot_general(w, y, numbers)
        g = lambda w: lax.dot_general(y, w, (numbers[0][::-1], numbers[1]))
        for h in (f, g):
            got, expected = mx.wrap(h)(value), h(mx.materialize(value))
            assert got.dtype == expected.dtype == jnp.float32
            coarse = 1e-5 if value.dtype == jnp.float32 else 0.01
            np.testing.assert_allclose(got, expected, rtol=0, atol=coarse * float(jnp.max(jnp.abs(expected))))
            assert densified(h, value) == []


@pytest.mark.parametrize("kind", SERVED[:3])
def test_product_with_an_array_of_numpy(kind):
    """An int8 array is multiplied by arrays of NumPy as by those of JAX, also in a jitted program."""
    value = VALUES[kind]()
    x, y = np.asarray(normal(3, 5, M)), np.asarray(normal(4, N, 5))
    for f in (lambda w: x @ w, lambda w: w @ y, jax.jit(lambda w: x @ w @ y)):
        assert_same(mx.wrap(f)(value), f(mx.materialize(value)))
        assert densified(f, value) == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", SERVED[:3])
def test_preferred_element_type_is_that_of_the_result(kind, dtype):
    """A product asked for in float32 is float32, summed in it."""
    value = VALUES[kind](dtype)
    x = operand(value)
    for f in (
        lambda w: jnp.matmul(x, w, preferred_element_type=jnp.float32),
        lambda w: jnp.matmul(w.T, x.T, preferred_element_type=jnp.float32),
    ):
        got, expected = mx.wrap(f)(value), f(mx.materialize(value))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_float16_neither_overflows_nor_loses_digits(size, axis):
    """Sums of the integers exceed float16 and its scales lie among its last digits; the product has its accuracy."""
    value = QuantizedArray.quantize(jnp.abs(normal(0, 2048, 4, dtype=jnp.float16)) * size, axis=axis)
    x = jnp.abs(normal(1, 8, 2048, dtype=jnp.float16))
    exact = np.asarray(x, np.float64) @ (np.asarray(value.qvalue, np.float64) * np.asarray(value.scale, np.float64))
    np.testing.assert_allclose(mx.wrap(lambda w: x @ w)(value), exact, rtol=1e-3)
    np.testing.assert_allclose(mx.wrap(lambda w: w.T @ x.T)(value), exact.T, rtol=1e-3)


LOOKUPS = {
    "2-D": lambda w: w[IDS],
    "1-D": lambda w: w[IDS[0]],
    "take": lambda w: jnp.take(w, IDS, axis=0),
    "clip": lambda w: w.at[IDS].get(mode="clip"),
    "fill 5": lambda w: w.at[IDS].get(mode="fill", fill_value=5.0),
    "fill 0": lambda w: w.at[IDS].get(mode="fill", fill_value=0),
    "columns": lambda w: w[..., IDS],
    "rows and columns": lambda w: w[jnp.array([5, 0, 9]), jnp.array([-1, 2, 0])],
}


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_gives_the_numbers_of_the_dense_array(name, kind, dtype):
    """Slices are looked up, also negative and out of range ones."""
    value = VALUES[kind](dtype)
    f = LOOKUPS[name]
    assert_same(mx.wrap(f)(value), f(mx.materialize(value)))


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        ("scale per row", {"rows"}),
        ("scale per column", {"columns"}),
        ("one scale", {"rows", "columns"}),
        ("scale per element", {"rows", "columns", "both"}),
        ("batch, scale per row", {"rows", "both"}),
        ("batch, scale per column", {"rows", "columns"}),
        ("batch, shared scales", {"columns"}),
    ],
)
def test_lookup_is_served_where_the_scale_stays_small(kind, served):
    """A lookup takes integers and scales, unless each index would need its own copy of scales that are shared."""
    value = VALUES[kind]()
    for which, f in (("rows", LOOKUPS["2-D"]), ("columns", LOOKUPS["columns"]), ("both", LOOKUPS["rows and columns"])):
        assert ("gather_slices_quantized" in rules(f, value)) is (which in served)
        assert densified(f, value) == ([] if which in served else ["gather"])


@pytest.mark.parametrize("axis", [-1, (0, 1, 2)])
def test_lookup_under_vmap(axis):
    """A lookup in each of a batch of tables takes integers and scales."""
    value = int8(axis, 3)
    f = jax.vmap(lambda w, i: w[i])
    ids = jnp.array([[1, 5], [0, 9], [-1, 2]])
    assert_same(mx.wrap(f)(value, ids), f(mx.materialize(value), ids))
    assert densified(f, value, ids) == []


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    "dtypes", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float16)]
)
def test_astype_converts_the_scale(dtypes, kind):
    """A conversion to another floating type is one of the scale."""
    value = VALUES[kind](dtypes[0])
    f = lambda w: w.astype(dtypes[1])
    out = mx.wrap(f)(value)
    assert (type(out), out.dtype, out.qvalue.dtype) == (QuantizedArray, dtypes[1], jnp.int8)
    got, expected = (np.asarray(x, np.float32) for x in (mx.materialize(out), f(mx.materialize(value))))
    np.testing.assert_allclose(got, expected, rtol=0.01)
    assert "convert_quantized" in rules(f, value)


def test_product_in_a_wider_type_uses_the_integers():
    """A bfloat16 array times a float32 one converts the scale and makes nothing dense."""
    value, x = VALUES["scale per column"](jnp.bfloat16), normal(3, 5, M)
    assert densified(lambda w, x: x @ w, value, x) == []
    assert mx.wrap(lambda w, x: x @ w)(value, x).dtype == jnp.float32


@pytest.mark.parametrize(
    ("operation", "f"),
    [
        ("add", lambda w: w + 1),
        ("sin", lambda w: jnp.sin(w)),
        ("mul", lambda w: w * jnp.ones((M, N))),
        ("mul", lambda w: jnp.ones((M, N)) * w),
        ("div", lambda w: w / jnp.full((M, N), 2.0)),
        ("convert_element_type", lambda w: w.astype(jnp.int32)),
        ("convert_element_type", lambda w: w.astype(jnp.complex64).real),
        ("dot_general", lambda w: w @ w.T),
    ],
)
def test_other_operations_make_it_dense(operation, f):
    """Where no rule fits, that one operation runs on the dense array."""
    value = VALUES["scale per row"]()
    assert_same(mx.wrap(f)(value), f(mx.materialize(value)))
    assert densified(f, value) == [operation]


@pytest.mark.parametrize("f", [lambda w, s: w * s, lambda w, s: s * w, lambda w, s: w / s])
def test_derivative_of_a_scalar_factor(f):
    """The derivative with respect to a factor is that of the dense program, from inside and outside."""
    value = VALUES["scale per row"]()
    loss = lambda w, s: jnp.sum(jnp.sin(jnp.ones((5, M)) @ f(w, s)))
    expected = jax.grad(loss, 1)(mx.materialize(value), 2.0)
    np.testing.assert_allclose(jax.grad(mx.wrap(loss), 1)(value, 2.0), expected, rtol=1e-4)
    np.testing.assert_allclose(mx.wrap(jax.grad(loss, 1))(value, 2.0), expected, rtol=1e-4)


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


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_transformation_gives_the_dense_numbers(name, kind):
    """A transformed program gives on an int8 array what it gives on the dense array, and uses the integers."""
    value = VALUES[kind]()
    x = 0.3 * operand(value, rows=2)
    construct = CONSTRUCTS[name]
    assert_same(construct(mx.wrap, value, x), construct(lambda f: f, mx.materialize(value), x))
    wrap = lambda f: mx.wrap(lambda *args: f(*args))  # a new function, which no jit has kept
    explanation = mx.explain(lambda w, x: construct(wrap, w, x))(value, x)
    assert explanation.materialized == ()
    expected = {"dot_general_array_quantized", "transpose_quantized", "neg_quantized", "mul_scalar_quantized"}
    assert expected <= {row.rule.split()[0] for row in explanation.rows}


@pytest.mark.parametrize(
    ("axis", "kind"),
    [(0, "batch, scale per row"), (1, "batch, scale per row"), *((i, "batch, scale per column") for i in range(3))],
)
def test_vmap_inside_over_any_axis(axis, kind):
    """A program can be mapped over each axis of an int8 array from inside."""
    value = VALUES[kind]()
    x = normal(3, *jnp.moveaxis(mx.materialize(value), axis, 0).shape[:2])
    g = jax.vmap(lambda w, x: x @ w, (axis, 0))
    assert_same(mx.wrap(g)(value, x), g(mx.materialize(value), x))
    assert densified(g, value, x) == []


def test_vmap_outside_over_the_parts():
    """A batch of int8 arrays can be mapped over from outside, and comes back stacked."""
    value = VALUES["batch, scale per row"]()
    x = operand(value)
    assert_same(jax.vmap(mx.wrap(network))(value, x), jax.vmap(network)(mx.materialize(value), x))
    out = jax.vmap(mx.wrap(lambda w: w.T))(value)
    assert type(out) is QuantizedArray
    assert_same(out, mx.materialize(value).mT)


# ------------------------------------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", ["x @ w", "w @ x", "mT", "2 * w", "lookup"])
def test_gradient_of_the_scale(name, kind):
    """From outside the gradient of the scale is that of the formula, and the integers have none."""
    value = VALUES[kind]()
    x = operand(value)
    f = {**{n: f for n, (f, _) in FUNCTIONS.items()}, "lookup": lambda w, x: w[jnp.array([1, 1, 0])]}[name]
    loss = lambda wrap: lambda w: jnp.sum(jnp.sin(mx.materialize(wrap(f)(w, x))))
    grads = jax.grad(loss(mx.wrap), allow_int=True)(value)
    expected = jax.grad(lambda scale: loss(lambda f: f)(value.qvalue.astype(scale.dtype) * scale))(value.scale)
    assert type(grads) is QuantizedArray
    assert grads.qvalue.dtype == jax.dtypes.float0
    assert_same(grads.scale, expected)


def test_filter_grad_of_a_model():
    """Equinox differentiates a model whose weight is int8, with respect to its scale."""
    model = eqx.nn.Linear(M, N, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.weight, model, QuantizedArray.quantize(model.weight))
    x = normal(3, 5, M)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        return jnp.sum(jnp.sin(mx.wrap(lambda m, x: jax.vmap(m)(x))(model, x)))

    grads = gradient(model)
    expected = jax.grad(
        lambda s, b: jnp.sum(jnp.sin(x @ (model.weight.qvalue.astype(jnp.float32) * s).T + b)), argnums=(0, 1)
    )(model.weight.scale, model.bias)
    assert grads.weight.qvalue is None
    assert_same((grads.weight.scale, grads.bias), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_tangent_is_floating(dtype):
    """Inside, an int8 array has a tangent and a gradient of its own shape and floating dtype."""
    value = VALUES["scale per row"](dtype)
    x = operand(value)
    tangent = normal(4, M, N, dtype=dtype)
    f = lambda w: jax.jvp(lambda w: x @ w, (w,), (tangent,))
    assert_same(mx.wrap(f)(value), f(mx.materialize(value)))
    grad = mx.wrap(jax.grad(lambda w: jnp.sum((x @ w).astype(jnp.float32))))(value)
    assert (type(grad), grad.shape, grad.dtype) == (type(x), (M, N), dtype)
    assert mx.aval_of(value).to_tangent_aval().dtype == dtype


def test_tangent_of_the_wrong_type_is_refused():
    """The tangent of an int8 array is not int8."""
    with pytest.raises(TypeError, match=r"float32.*int8|int8.*float32"):
        mx.wrap(lambda w: jax.jvp(lambda w: 2 * w, (w,), (jnp.ones((M, N), jnp.int8),)))(VALUES["scale per row"]())


def test_jvp_of_the_scale():
    """From outside a tangent of the scale gives the tangent of the product."""
    value = VALUES["scale per column"]()
    x = operand(value)
    f = lambda scale: mx.wrap(lambda w: x @ w)(QuantizedArray(value.qvalue, scale))
    by_hand = lambda scale: x @ (value.qvalue.astype(jnp.float32) * scale)
    direction = normal(4, 1, N)
    assert_same(jax.jvp(f, (value.scale,), (direction,)), jax.jvp(by_hand, (value.scale,), (direction,)))


# ------------------------------------------------------------------------------------------------ quantizing


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), [0, -1], ()], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_error_of_rounding_is_at_most_half_the_scale(dtype, axis):
    """Each element differs from integer times scale by at most half the scale, for arrays of any size of number."""
    for size in 10.0 ** np.arange(-7 if dtype == jnp.float16 else -30, 4, 1.5):
        x = (normal(7, 16, 33) * size).astype(dtype)
        value = QuantizedArray.quantize(x, axis=axis)
        q, s, x = (np.asarray(part, np.float64) for part in (value.qvalue, value.scale, x))
        assert np.max(np.abs(q)) <= 127
        assert np.all(np.abs(q * s - x) <= 0.5 * s * (1 + 1e-4))


def test_scale_does_not_vanish():
    """Numbers just above the smallest of float32 have a scale that is one itself."""
    x = jnp.array([[1e-37, 2e-38, 0.0]])
    value = QuantizedArray.quantize(x)
    assert value.scale == jnp.finfo(jnp.float32).tiny
    np.testing.assert_array_equal(value.qvalue, [[9, 2, 0]])


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 1e-30), (jnp.bfloat16, 1e-30), *((d, 1) for d in FLOATS)])
def test_largest_magnitude_becomes_127(dtype, size):
    """The element of the largest magnitude along the axis becomes 127 or -127, and the scale keeps the axis."""
    x = (normal(7, 16, 33) * size).astype(dtype)
    value = QuantizedArray.quantize(x, axis=-1)
    assert (value.scale.shape, value.scale.dtype, value.dtype) == ((16, 1), dtype, dtype)
    np.testing.assert_array_equal(jnp.max(jnp.abs(value.qvalue), axis=1), 127)
    np.testing.assert_array_equal(jnp.sign(value.qvalue) * jnp.sign(x) >= 0, True)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), ()])
def test_axis_may_be_any_of_an_array_of_any_rank(shape):
    """Arrays of any number of dimensions are quantized, along each axis or all together."""
    x = normal(0, *shape)
    for axis in (*range(len(shape)), tuple(range(len(shape)))):
        value = QuantizedArray.quantize(x, axis=axis)
        assert value.shape == shape
        np.testing.assert_allclose(mx.materialize(value), x, rtol=0, atol=float(jnp.max(jnp.abs(x))) / 250)


def test_zero_rows_stay_zero():
    """A row of zeros has scale 1, and no row an invalid one."""
    value = QuantizedArray.quantize(jnp.array([[0.0, 0.0], [1.0, -2.0]]))
    np.testing.assert_array_equal(value.scale, [[1], [np.float32(2) / 127]])
    np.testing.assert_array_equal(value.qvalue, [[0, 0], [64, -127]])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_shows(bad):
    """A row that holds what is not finite becomes NaN, and no other row does."""
    dense = mx.materialize(QuantizedArray.quantize(jnp.array([[bad, 1.0], [3.0, 1.0]])))
    assert jnp.all(jnp.isnan(dense[0]))
    np.testing.assert_allclose(dense[1], [3.0, 1.0], rtol=0.02)


def test_empty_array():
    """An array without elements is quantized."""
    value = QuantizedArray.quantize(jnp.zeros((3, 0)))
    assert (value.shape, value.scale.shape) == ((3, 0), (3, 1))


def test_quantize_traces():
    """Quantizing under jit and vmap gives the same integers."""
    x = normal(0, 3, M, N)
    expected = QuantizedArray.quantize(x)
    for made in (jax.jit(QuantizedArray.quantize)(x), jax.vmap(QuantizedArray.quantize)(x)):
        np.testing.assert_array_equal(made.qvalue, expected.qvalue)
        np.testing.assert_allclose(made.scale, expected.scale, rtol=1e-6)


def test_quantize_of_a_quantized_array_changes_nothing():
    """The dense array of an int8 array is quantized to the same integers."""
    value = VALUES["scale per row"]()
    np.testing.assert_array_equal(QuantizedArray.quantize(mx.materialize(value)).qvalue, value.qvalue)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_what_quantize_refuses(dtype):
    """Only a floating array is quantized."""
    with pytest.raises(TypeError) as raised:
        QuantizedArray.quantize(jnp.zeros((M, N), dtype))
    assert str(raised.value) == f"`quantize` takes a floating array, got dtype {dtype}."


@pytest.mark.parametrize("shape", [(6,), (4,), (1,), (), (6, 2), (2, 4), (1, 6), (1, 1, 1), (6, 4, 1)])
def test_scale_that_does_not_fit(shape):
    """A scale has as many dimensions as the integers, each of the same length or of length 1."""
    with pytest.raises(ValueError) as raised:
        QuantizedArray(jnp.zeros((M, N), jnp.int8), jnp.ones(shape))
    assert str(raised.value) == (
        f"`scale` of shape {shape} does not fit `qvalue` of shape (6, 4): each axis has its length, or length 1."
    )


@pytest.mark.parametrize("shape", [(6, 4), (6, 1), (1, 4), (1, 1)])
def test_scale_that_fits(shape):
    """Along each axis the scale varies or is shared."""
    value = QuantizedArray(jnp.ones((M, N), jnp.int8), jnp.full(shape, 2.0))
    assert [value.is_shared(i) for i in range(2)] == [n == 1 for n in shape]
    assert_same(mx.materialize(value), 2 * jnp.ones((M, N)))


def test_is_immutable():
    """A field cannot be set."""
    with pytest.raises(dataclasses.FrozenInstanceError) as raised:
        VALUES["scale per row"]().scale = 1
    assert str(raised.value) == (
        "cannot set 'scale' of a `QuantizedArray`: values are immutable. Use `dataclasses.replace(x, scale=...)`."
    )


def test_is_a_small_pytree_of_its_arrays():
    """The integers and the scale are leaves with names, of about a quarter of the bytes of the float32 array."""
    value = VALUES["scale per row"]()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    assert paths == [".qvalue", ".scale"]
    assert value.nbytes == M * N + 4 * M


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
    assert (back.qvalue.dtype, back.scale.dtype) == (jnp.int8, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, back, value)


# ------------------------------------------------------------------------------------------------ programs


def operations(compiled):
    return Counter(re.findall(r"^\s*(?:ROOT )?\S+ = \S+ ([\w-]+)\(", compiled.as_text(), re.MULTILINE))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", ["scale per row", "scale per column"])
def test_compiled_program_is_that_written_by_hand(kind, dtype):
    """The compiled product has the operations and flops of the formula written out."""
    value = VALUES[kind](dtype)

    def by_hand(q, s, x):
        product = lambda x: jnp.matmul(x, q.astype(dtype), preferred_element_type=jnp.float32)
        out = product(x * s.T) if kind == "scale per row" else product(x) * s.astype(jnp.float32)
        return out.astype(dtype)

    x = operand(value)
    compiled = jax.jit(mx.wrap(lambda w, x: x @ w)).lower(value, x).compile()
    expected = jax.jit(by_hand).lower(value.qvalue, value.scale, x).compile()
    assert compiled.cost_analysis()["flops"] == expected.cost_analysis()["flops"] > 0
    assert operations(compiled) == operations(expected) != Counter()


def all_jaxprs(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from all_jaxprs(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize(
    "f",
    [*(f for f, _ in PRODUCTS.values()), network, jax.checkpoint(network), jax.jit(network), jax.grad(loss, 1)],
    ids=[*PRODUCTS, "network", "checkpoint", "jit", "grad"],
)
def test_integers_become_floating_for_products_only(f, kind):
    """A floating copy of the integers goes into a product and nowhere else."""
    value = VALUES[kind]()
    jaxpr = jax.make_jaxpr(mx.wrap(f))(value, operand(value)).jaxpr
    converted = 0
    for inner in all_jaxprs(jaxpr):
        copies = [
            eqn.outvars[0]
            for eqn in inner.eqns
            if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == jnp.int8
        ]
        assert not any(v is c for v in inner.outvars for c in copies)
        users = [eqn.primitive.name for eqn in inner.eqns if any(v is c for v in eqn.invars for c in copies)]
        assert users == ["dot_general"] * len(copies)
        converted += len(copies)
    assert converted > 0


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
    g(dataclasses.replace(value, scale=2 * value.scale), operand(value))
    assert len(traces) == 1
