"""One law, for every construct and kind of value: the dense result is the result on the dense value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import morphax as mx

from ..values import MATERIALIZABLE, X, dense

Y = X[::-1] / 3


@jax.custom_jvp
def scaled(w, y):
    """Its rule is marked by a factor of 7."""
    return w * y


scaled.defjvp(lambda p, t: (scaled(*p), 7.0 * (t[0] * p[1] + p[0] * t[1])))


@jax.custom_jvp
def with_zeros(w, y):
    """Its rule sees symbolic zeros."""
    return w * y


def _with_zeros_jvp(primals, tangents):
    w, y = primals
    terms = [t * o for t, o in zip(tangents, (y, w), strict=True) if type(t).__name__ != "SymbolicZero"]
    return w * y, 3.0 * sum(terms, jnp.zeros_like(Y))


with_zeros.defjvp(_with_zeros_jvp, symbolic_zeros=True)


@jax.custom_vjp
def reversed_scaled(w, y):
    """Its backward function is marked by factors of 3 and 5; both operands are residuals."""
    return w * y


reversed_scaled.defvjp(lambda w, y: (w * y, (w, y, w + y)), lambda r, g: (3.0 * g * r[1], 5.0 * g * r[0] + 0 * r[2]))


@jax.custom_vjp
def returning(w, y):
    """Returns its operands."""
    return w, y


returning.defvjp(lambda w, y: ((w, y), None), lambda _, g: (2.0 * g[0], 3.0 * g[1]))


def f(w, y):
    """Uses the value twice, once as a whole."""
    return jnp.tanh(w * y) + w.sum()


FUNCTIONS = {
    "eager": f,
    "jit": jax.jit(f),
    "jit in jit": jax.jit(lambda w, y: jax.jit(f)(w, y) * 2),
    "jit returning the value": jax.jit(lambda w, y: (w, w + y)),
    "jit, static argument": lambda w, y: jax.jit(lambda w, n, y: w * n + y, static_argnums=1)(w, 3, y),
    "jit, inline": jax.jit(f, inline=True),
    "jit, unused operand kept": jax.jit(lambda w, y: y + 1, keep_unused=True),
    "checkpoint": jax.checkpoint(f),
    "checkpoint, policy": jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable),
    "checkpoint returning the value": jax.checkpoint(lambda w, y: (w, w + y)),
    "custom_jvp": scaled,
    "custom_jvp in jit": jax.jit(scaled),
    "custom_jvp, symbolic zeros": with_zeros,
    "custom_vjp": reversed_scaled,
    "custom_vjp in jit": jax.jit(reversed_scaled),
    "custom_vjp returning operands": returning,
    "relu": lambda w, y: jax.nn.relu(w - y),
    "gelu": lambda w, y: jax.nn.gelu(w - y),
    "silu": lambda w, y: jax.nn.silu(w - y),
    "logsumexp": lambda w, y: jax.nn.logsumexp(w - y),
    "logaddexp": lambda w, y: jnp.logaddexp(w, y),
    "relu alone": lambda w, y: jax.nn.relu(w) + y,
    "vmap": jax.vmap(f),
    "vmap, value unbatched": lambda w, y: jax.vmap(f, (None, 0))(w, jnp.stack([y, y + 1])),
    "vmap, other axes": lambda w, y: jax.vmap(lambda w, y: w * y, (1, -1), 1)(w, y),
    "vmap of vmap": lambda w, y: jax.vmap(jax.vmap(jnp.multiply), (1, 1))(w, y),
    "vmap of custom_jvp": lambda w, y: jax.vmap(scaled, (None, 0))(w, jnp.stack([y, y + 1])),
    "vmap of custom_vjp": lambda w, y: jax.vmap(reversed_scaled, (None, 0))(w, jnp.stack([y, y + 1])),
    "grad inside": lambda w, y: jax.grad(lambda w, y: f(w, y).sum(), argnums=(0, 1))(w, y),
    "grad of jit inside": lambda w, y: jax.grad(lambda w, y: jax.jit(f)(w, y).sum())(w, y),
    "grad of checkpoint inside": lambda w, y: jax.grad(lambda w, y: jax.checkpoint(f)(w, y).sum(), (0, 1))(w, y),
    "grad of custom_jvp inside": lambda w, y: jax.grad(lambda w, y: scaled(w, y).sum(), (0, 1))(w, y),
    "grad of custom_vjp inside": lambda w, y: jax.grad(lambda w, y: reversed_scaled(w, y).sum(), (0, 1))(w, y),
    "jvp inside": lambda w, y: jax.jvp(f, (w, y), (w, y)),
    "linearize inside": lambda w, y: jax.linearize(lambda y: f(w, y), y)[1](y),
    "linear_transpose inside": lambda w, y: jax.linear_transpose(lambda y: w * y, y)(y),
    "jacfwd inside": lambda w, y: jax.jacfwd(f, 1)(w, y),
    "jacrev inside": lambda w, y: jax.jacrev(f)(w, y),
    "hessian inside": lambda w, y: jax.hessian(lambda y: f(w, y).sum())(y),
    "stop_gradient": lambda w, y: jax.grad(lambda w: (lax.stop_gradient(w) * w).sum())(w),
    "copy": lambda w, y: jnp.array(w) * y,
    "optimization_barrier": lambda w, y: lax.optimization_barrier((w, y)),
    "device_put": lambda w, y: jax.device_put(w, jax.devices()[0]) * y,
    "convert to own dtype": lambda w, y: w.astype(w.dtype),
    "square, powers": lambda w, y: (jnp.square(w), w**2, w**3, w**5),
    "split and stack": lambda w, y: (jnp.split(w, 2, axis=1), jnp.stack([w, y])),
    "eval_shape": lambda w, y: jnp.zeros(jax.eval_shape(f, w, y).shape) + w,
}
VALUES = pytest.mark.parametrize("value", MATERIALIZABLE.values(), ids=MATERIALIZABLE)


def check(got, want):
    """The same structure, shapes, dtypes and numbers."""
    got, want = dense(got), dense(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@VALUES
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_inside(function, value):
    """The construct is inside `wrap`."""
    check(mx.wrap(function)(value, Y), function(mx.materialize(value), Y))


IN_JIT = (
    "eager",
    "jit",
    "jit returning the value",
    "checkpoint",
    "custom_jvp",
    "custom_vjp",
    "relu",
    "vmap",
    "grad inside",
)
PYTREES = {k: v for k, v in MATERIALIZABLE.items() if k != "no pytree"}


@pytest.mark.parametrize("value", PYTREES.values(), ids=PYTREES)
@pytest.mark.parametrize("name", IN_JIT)
def test_jit_outside(name, value):
    """`jit` of the wrapped function."""
    check(jax.jit(mx.wrap(FUNCTIONS[name]))(value, Y), FUNCTIONS[name](mx.materialize(value), Y))


DIFFERENTIABLE = {k: v for k, v in PYTREES.items() if k != "no leaf"}
DERIVED = (
    "eager", "jit", "jit in jit", "checkpoint", "checkpoint, policy", "custom_jvp", "custom_jvp in jit", "custom_jvp, symbolic zeros",
    "custom_vjp", "custom_vjp in jit", "relu", "gelu", "silu", "logsumexp", "logaddexp", "relu alone", "vmap",
    "vmap of custom_jvp", "vmap of custom_vjp", "custom_vjp returning operands",
)  # fmt: skip


def total(function):
    """A number that every result takes part in."""
    return lambda w, y: sum((i + 1) * x.sum() for i, x in enumerate(jax.tree.leaves(dense(function(w, y)))))


@pytest.mark.parametrize("value", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize("name", DERIVED)
def test_grad_outside(name, value):
    """The gradient with respect to the leaves is that through `materialize`."""
    loss = total(FUNCTIONS[name])
    got = jax.grad(lambda w, y: total(mx.wrap(FUNCTIONS[name]))(w, y), (0, 1), allow_int=True)(value, Y)
    check_trees(got, jax.grad(lambda w, y: loss(mx.materialize(w), y), (0, 1), allow_int=True)(value, Y))


@pytest.mark.parametrize("value", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize("name", [n for n in DERIVED if "custom_vjp" not in n])
def test_jvp_outside(name, value):
    """Forward mode, along the leaves."""

    def tangent(x):
        return jnp.ones_like(x) / 2 if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)

    direction = jax.tree.map(tangent, (value, Y))
    got = jax.jvp(total(mx.wrap(FUNCTIONS[name])), (value, Y), direction)
    check_trees(got, jax.jvp(lambda w, y: total(FUNCTIONS[name])(mx.materialize(w), y), (value, Y), direction))


@pytest.mark.parametrize("value", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize("name", ["eager", "jit", "checkpoint", "custom_jvp", "relu", "gelu"])
def test_hessian_outside(name, value):
    """Second derivatives, forward over reverse, along the plain operand."""
    loss = total(FUNCTIONS[name])
    got = jax.hessian(lambda y: total(mx.wrap(FUNCTIONS[name]))(value, y))(Y)
    check_trees(got, jax.hessian(lambda y: loss(mx.materialize(value), y))(Y))


STACKING = {
    k: v for k, v in PYTREES.items() if k in ("one leaf", "nonlinear", "product", "several leaves", "NamedTuple")
}


@pytest.mark.parametrize("value", STACKING.values(), ids=STACKING)
@pytest.mark.parametrize("name", ["eager", "jit", "checkpoint", "custom_jvp", "custom_vjp", "relu"])
def test_vmap_outside(name, value):
    """Leaves with a batch axis: each slice is a value."""
    stacked = jax.tree.map(lambda x: jnp.stack([x, x / 2]), value)
    got = dense(jax.vmap(mx.wrap(FUNCTIONS[name]), (0, None))(stacked, Y))
    check(got, jax.vmap(FUNCTIONS[name], (0, None))(jax.vmap(mx.materialize)(stacked), Y))


def check_trees(got, want):
    """As `check`, without materializing: gradients of values are values of gradients."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
