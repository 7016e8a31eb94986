"""What a call costs that has been traced and compiled before, and what a loop does."""

import jax
import jax.numpy as jnp
from jax import lax

import morphax as mx

from ..values import Box, Exp, X


def small(y):
    return lax.mul(lax.sin(y), y)


def step(c, x):
    return lax.sin(c), None


def loop(v):
    return lax.scan(step, v, None, 10)[0]


def test_jit_of_wrapped(against):
    """JAX's C++ path, and the value as a pytree."""
    plain, wrapped, v = jax.jit(small), jax.jit(mx.wrap(small)), Box(X)
    against(lambda: plain(X), lambda: wrapped(v), bar=1.5, n=500)


def test_wrapped_jit(against):
    """Kept as a jit of the dispatching call."""
    plain, v = jax.jit(small), Box(X)
    wrapped = mx.wrap(plain)
    against(lambda: plain(X), lambda: wrapped(v), bar=2.5, n=500)


def test_jit_called_in_a_wrapped_function(against):
    """JAX's path in Python, a lookup, and C++."""
    plain, v = jax.jit(small), Box(X)
    wrapped = mx.wrap(lambda v: plain(v))
    against(lambda: plain(X), lambda: wrapped(v), bar=15, n=500)


def test_eager_loop(against):
    """Called again with the same body."""
    v = Box(X)
    wrapped = mx.wrap(loop)
    against(lambda: loop(X), lambda: wrapped(v), bar=3, n=50)


def test_traced_loop(against):
    """The body is traced once by JAX, and once over leaves."""
    against(
        lambda: jax.make_jaxpr(lambda v: loop(v))(X) and None,
        lambda: jax.make_jaxpr(lambda v: mx.wrap(loop)(v))(Box(X)) and None,
        bar=4,
    )


def test_running_a_loop_with_a_computed_weight(against):
    """It is computed before the loop, forward and in the gradient, as by hand."""
    w, h = jax.random.normal(jax.random.key(0), (256, 256)) / 16, jnp.ones(256)

    def run(w, h):
        return lax.scan(lambda h, _: (jnp.tanh(w @ h), None), h, None, 64)[0].sum()

    by_hand = jax.jit(jax.grad(lambda log: run(jnp.exp(log), h)))
    wrapped = jax.jit(jax.grad(lambda log: mx.wrap(run)(Exp(log), h)))
    against(lambda: by_hand(w), lambda: wrapped(w), bar=1.3, n=10)
