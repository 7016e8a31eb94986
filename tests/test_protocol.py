"""Objects that only have `__jax_array__`, and what people want to do with them."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import morphax as mx

A = jnp.arange(9.0).reshape(3, 3)


@mx.register_type
class PlainObject:
    """A plain class."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


@jax.tree_util.register_pytree_node_class
class Container:
    """A pytree."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


OBJECTS = {"object": PlainObject(A), "pytree": Container(A)}
FUNCTIONS = {
    "asarray": jnp.asarray,
    "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "lax": lambda a: lax.add(a, A),
    "vmap": lambda a: jax.vmap(jnp.sum)(a),
    "grad": lambda a: jax.grad(lambda a: (a * a).sum())(a),
    "operators": lambda a: A + a * 2,
    "methods": lambda a: a.sum(),
}


@pytest.mark.parametrize("value", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_inside_wrap_an_object_is_an_array(function, value):
    """In functions that JAX's own protocol does not reach too, with and without `disable_jit`."""
    np.testing.assert_allclose(mx.materialize(mx.wrap(function)(value)), function(A), rtol=1e-5)
    with jax.disable_jit():
        np.testing.assert_allclose(mx.materialize(mx.wrap(function)(value)), function(A), rtol=1e-5)


@pytest.mark.parametrize("value", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("name", ["asarray", "svd"])
def test_outside_wrap_it_is_as_in_jax(name, value):
    """The protocol still works where JAX has it."""
    np.testing.assert_allclose(FUNCTIONS[name](value), FUNCTIONS[name](A), rtol=1e-5)


class Buffer(NamedTuple):
    """A weight that is not trained."""

    value: Any

    def __jax_array__(self):
        return lax.stop_gradient(jnp.asarray(self.value))


class Symmetric(NamedTuple):
    """A weight that is made symmetric."""

    value: Any

    def __jax_array__(self):
        return self.value + self.value.T


class SpectralNorm(NamedTuple):
    """A weight divided by an estimate of its largest singular value, by a step of power iteration."""

    value: Any
    u: Any
    v: Any

    def __jax_array__(self):
        w = jnp.asarray(self.value)
        v = w.T @ self.u
        v = lax.stop_gradient(v / jnp.linalg.norm(v))
        u = w @ v
        u = lax.stop_gradient(u / jnp.linalg.norm(u))
        return w / (u @ w @ v)


W = A / 9 + jnp.eye(3)
WEIGHTS = {
    "Buffer": Buffer(W),
    "Symmetric": Symmetric(W),
    "SpectralNorm": SpectralNorm(W, jnp.ones(3), jnp.ones(3)),
    "nested": SpectralNorm(Symmetric(W), jnp.ones(3), jnp.ones(3)),
    "frozen": Buffer(Symmetric(W)),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_computed_weights_in_an_unmodified_model(weight):
    """Values and gradients are those of the model on the computed array."""
    mlp = eqx.nn.MLP(3, 3, 3, 1, key=jax.random.key(0))
    x = jnp.arange(6.0).reshape(2, 3)

    def loss(model):
        return (mx.wrap(lambda m, x: jax.vmap(m)(x))(model, x) ** 2).sum()

    def put(w):
        return eqx.tree_at(lambda m: m.layers[0].weight, mlp, w)

    got, grads = jax.value_and_grad(lambda w: loss(put(w)))(weight)
    want, by_hand = jax.value_and_grad(lambda w: loss(put(mx.materialize(w))))(weight)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(by_hand), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_scan_over_a_symmetric_value_is_over_its_rows():
    """Slicing its leaf would be silently wrong: 6, 24, 42."""
    rows = mx.wrap(lambda s: lax.scan(lambda c, row: (c, row.sum()), 0.0, s)[1])(Symmetric(A))
    np.testing.assert_allclose(rows, [12.0, 24.0, 36.0])
    np.testing.assert_allclose(mx.wrap(lambda s: jax.vmap(jnp.sum)(s))(Symmetric(A)), [12.0, 24.0, 36.0])


class MatrixProduct(mx.ArrayValue):
    """A product of two matrices that is never formed."""

    left: Array
    right: Array

    def aval(self):
        return jax.core.ShapedArray((self.left.shape[0], self.right.shape[1]), self.left.dtype)

    def __jax_array__(self):
        raise MemoryError("the product is not to be formed")


@mx.register(lax.dot_general_p)
def dot_general_product_array(x: MatrixProduct, y: jax.Array, *, dimension_numbers, **params):
    inner = lax.dot_general(x.right, y, dimension_numbers, **params)
    return x.left @ inner


def test_a_lazy_matrix_is_applied_in_every_iteration_of_a_solver():
    """And never made dense."""
    root = jnp.eye(4) * 2 + 0.1
    lazy, b = MatrixProduct(root, root), jnp.arange(4.0)
    solve = lambda m, b: jax.scipy.sparse.linalg.cg(lambda v: m @ v, b)[0]
    np.testing.assert_allclose(mx.wrap(solve)(lazy, b), jnp.linalg.solve(root @ root, b), rtol=1e-4)
    np.testing.assert_allclose(jax.jit(mx.wrap(solve))(lazy, b), jnp.linalg.solve(root @ root, b), rtol=1e-4)


def test_a_container_of_values_that_are_containers():
    """Values nest in pytrees and in each other."""
    model = {"layers": [{"w": Symmetric(W), "b": Buffer(W[0])}, {"w": SpectralNorm(Buffer(W), W[0], W[0]), "b": W[1]}]}

    def apply(model, x):
        for layer in model["layers"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    dense = jax.tree.map(mx.materialize, model, is_leaf=mx.is_value)
    np.testing.assert_allclose(mx.wrap(apply)(model, W), apply(dense, W), rtol=1e-5)


class Role(mx.ArrayValue):
    """An array that knows what it is for."""

    array: Array
    role: str = mx.field(static=True)

    def aval(self):
        return jax.typeof(self.array)

    def __jax_array__(self):
        return self.array


def test_metadata_passes_through_a_whole_training_step():
    """Roles say what the optimizer may touch, and are still there after it."""
    params = {
        "w": Role(W, "parameter"),
        "shift": Role(W[0], "buffer"),
        "mean": Role(jnp.zeros(3), "running statistic"),
    }

    def loss(params, x):
        y = mx.wrap(lambda p, x: jnp.tanh((x - p["mean"]) @ p["w"] + p["shift"]))(params, x)
        return (y**2).mean()

    @jax.jit
    def step(params, x):
        grads = jax.grad(loss)(params, x)

        def update(p, g):
            if p.role == "parameter":
                return Role(p.array - 0.1 * g.array, p.role)
            if p.role == "running statistic":
                return Role(0.9 * p.array + 0.1 * x.mean(0), p.role)
            return p

        return jax.tree.map(update, params, grads, is_leaf=lambda v: isinstance(v, Role))

    after = functools.reduce(lambda p, _: step(p, W), range(3), params)
    assert {k: v.role for k, v in after.items()} == {k: v.role for k, v in params.items()}
    assert float(loss(after, W)) < float(loss(params, W))
    np.testing.assert_array_equal(after["shift"].array, params["shift"].array)
