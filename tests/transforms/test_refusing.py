"""Values that refuse to become arrays pass through every construct that has rules for what is done inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import morphax as mx
from morphax import errors

from ..values import Metre, X
from .test_law import sharded

Y = X[::-1] / 9


@jax.custom_jvp
def tripled(w, y):
    """Its rule is marked by a factor of 3."""
    return w * y


tripled.defjvp(lambda p, t: (tripled(*p), (t[0] * p[1] + p[0] * t[1]) * 3.0))


@jax.custom_vjp
def weighted(w, y):
    """Its backward function is marked by factors of 3 and 5."""
    return w * y


weighted.defvjp(lambda w, y: (w * y, (w, y)), lambda r, g: (3.0 * (g * r[1]), 5.0 * (g * r[1])))

CONSTRUCTS = {
    "eager": lambda w, y: w * y,
    "jit": jax.jit(lambda w, y: w * y),
    "jit in jit": jax.jit(lambda w, y: jax.jit(lambda w: w * y)(w) * 2.0),
    "checkpoint": jax.checkpoint(lambda w, y: w * y),
    "custom_jvp": tripled,
    "custom_vjp": weighted,
    "vmap": jax.vmap(lambda w, y: w * y),
    "vmap, other axis": jax.vmap(lambda w, y: w * y, 1, 1),
    "vmap of jit": jax.vmap(jax.jit(lambda w, y: w * y)),
    "scan, constant": lambda w, y: lax.scan(lambda c, x: (c, w * x), 0.0, jnp.stack([y, y]))[1],
    "scan, carry": lambda w, y: lax.scan(lambda c, x: (c * x, None), w, jnp.stack([y, y]))[0],
    "scan, xs and ys": lambda w, y: lax.scan(lambda c, r: (c, r * y[0]), 0.0, w)[1],
    "scan, reverse": lambda w, y: lax.scan(lambda c, x: (c * x, c), w, jnp.stack([y, y]), reverse=True),
    "scan, unroll": lambda w, y: lax.scan(lambda c, x: (c * x, c), w, jnp.stack([y, y, y]), unroll=2),
    "scan, length 0": lambda w, y: lax.scan(lambda c, x: (c * x, None), w, jnp.zeros((0, 3, 2)))[0],
    "while_loop": lambda w, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * y), (0, w))[1],
    "fori_loop": lambda w, y: lax.fori_loop(0, 3, lambda i, c: c * y, w),
    "map": lambda w, y: lax.map(lambda x: w * x, y[:, 0]),
    "map over the value": lambda w, y: lax.map(lambda r: r * y[0], w),
    "cond": lambda w, y: lax.cond(y[0, 0] > 0, lambda w: w * y, lambda w: w, w),
    "switch": lambda w, y: lax.switch(1, [lambda w: w, lambda w: w * y, lambda w: w * 2.0], w),
    "platform_dependent": lambda w, y: lax.platform_dependent(w, y, cpu=lambda w, y: w * y, default=lambda w, y: w),
    "composite": lambda w, y: lax.composite(lambda w, y: w * y, "my.op")(w, y),
    "jaxpr": lambda w, y: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(lambda w, y: w * y)(w, y))(w, y)[0],
    "shard_map": lambda w, y: sharded(lambda w, x: w * x, (P(None, "i"), P(None, "i")), P(None, "i"))(w, y),
    "shard_map, captured": lambda w, y: sharded(lambda x: w * x, P(), P())(y),
    "stop_gradient": lambda w, y: lax.stop_gradient(w) * y,
    "optimization_barrier": lambda w, y: lax.optimization_barrier(w) * y,
    "device_put": lambda w, y: jax.device_put(w, jax.devices()[0]) * y,
    "asarray, copy": lambda w, y: jnp.asarray(w) * y,
    "name": lambda w, y: checkpoint_name(w, "w") * y,
    "ensure_compile_time_eval": lambda w, y: _compile_time(w) * y,
}


def _compile_time(w):
    with jax.ensure_compile_time_eval():
        assert float(jnp.ones(3).sum()) == 3
    return w


def leaves(tree):
    """What the values in a pytree hold; all of them are lengths."""
    values = jax.tree.leaves(tree, is_leaf=mx.is_value)
    assert all(type(v) is Metre for v in values)
    return [v.array for v in values]


def same(got, want):
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["eager", "jit outside"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_unit_survives(name, outside):
    """The result is a length, and its numbers are those of the function on numbers."""
    function = CONSTRUCTS[name]
    same(leaves(outside(mx.wrap(function))(Metre(X), Y)), function(X, Y))


@pytest.mark.parametrize(
    "name", ["eager", "jit", "checkpoint", "custom_jvp", "custom_vjp", "vmap", "scan, carry", "cond"]
)
def test_gradients_outside(name):
    """The gradient with respect to a length is a length; what was differentiated is a number per metre."""
    function = CONSTRUCTS[name]
    got = jax.grad(lambda w, y: leaves(mx.wrap(function)(w, y))[0].sum(), (0, 1))(Metre(X), Y)
    want = jax.grad(lambda w, y: function(w, y).sum(), (0, 1))(X, Y)
    assert type(got[0]) is Metre
    same([got[0].array, got[1]], want)


@pytest.mark.parametrize(
    "name", ["eager", "jit", "checkpoint", "custom_jvp", "vmap", "scan, carry", "while_loop", "cond"]
)
def test_forward_mode_outside(name):
    """Along a length."""
    function = CONSTRUCTS[name]
    _, got = jax.jvp(lambda w, y: mx.wrap(function)(w, y), (Metre(X), Y), (Metre(X / 2), Y))
    same(leaves(got), jax.jvp(function, (X, Y), (X / 2, Y))[1])


REFUSED = {
    "a primitive": (lambda w, y: jnp.sin(w), "`sin` of"),
    "a callback": (
        lambda w, y: jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(y.shape, y.dtype), w),
        "`pure_callback` of",
    ),
    "a reference": (lambda w, y: jax.new_ref(w), "refuses"),
    "in a jit": (lambda w, y: jax.jit(jnp.sin)(w), "`sin` of"),
    "in a scan": (lambda w, y: lax.scan(lambda c, x: (c, jnp.sin(w)), 0.0, y), "`sin` of"),
    "in a derivative": (lambda w, y: jax.grad(lambda y: jnp.sin(w * y).sum())(y), "`sin` of"),
    "collected ys of two units": (lambda w, y: lax.scan(lambda w, _: (w * w, w), w, None, 2), "leaves it as"),
    "a branch of another unit": (lambda w, y: lax.cond(y[0, 0] > 0, lambda w: w * w, lambda w: w, w), "branches of"),
    "the right-hand side of a solve": (
        lambda w, y: lax.custom_linear_solve(lambda v: v * 2, w, lambda mv, b: b / 2),
        "refuses",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_has_to_become_an_array_an_error_says_so(name):
    """With the reason that the type gave, and the user's line."""
    function, told = REFUSED[name]
    with pytest.raises(errors.MorphaxError, match=told) as caught:
        mx.wrap(function)(Metre(X), Y)
    assert "the unit would be lost" in str(caught.value)
    assert "test_refusing.py" in str(caught.value)
