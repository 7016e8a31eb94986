"""A transformer encoder with LoRA weights, against the same with LoRA written out by hand."""

import jax
import jax.numpy as jnp
import pytest

import morphax as mx
from morphax.arrays import LoraArray

D, HEADS, LAYERS, RANK = 128, 4, 4, 4
SHAPES = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}


def encoder(params, x, product=jnp.matmul):
    """Unmodified code; ``x`` has shape [batch, time, D]."""
    for p in params:
        b, t, d = x.shape
        q, k, v = (product(x, p[n]).reshape(b, t, HEADS, d // HEADS) for n in ("q", "k", "v"))
        s = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / (d // HEADS) ** 0.5)
        x = jax.nn.standardize(x + product(jnp.einsum("bhts,bshd->bthd", s, v).reshape(b, t, d), p["o"]))
        x = jax.nn.standardize(x + product(jax.nn.gelu(product(x, p["up"])), p["down"]))
    return x


def by_hand(x, w):
    return x @ w[0] + (x @ w[2]) @ w[1]


def _weights(make):
    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS * len(SHAPES)))
    random = lambda *shape: jax.random.normal(next(keys), shape) * 0.05
    return [
        {n: make(random(m, k), random(RANK, k), random(m, RANK)) for n, (m, k) in SHAPES.items()} for _ in range(LAYERS)
    ]


HAND = _weights(lambda w, a, b: (w, a, b))
LORA = _weights(lambda w, a, b: LoraArray(w, a, b, alpha=RANK, frozen=False))
H = jax.random.normal(jax.random.key(1), (8, 16, D))
plain, wrapped = (lambda p, h: encoder(p, h, by_hand)), mx.wrap(lambda p, h: encoder(p, h))


def test_trace(against):
    """Most operations are on arrays."""
    against(
        lambda: jax.make_jaxpr(lambda p, h: plain(p, h))(HAND, H) and None,
        lambda: jax.make_jaxpr(lambda p, h: wrapped(p, h))(LORA, H) and None,
        bar=1.7,
        n=3,
    )


@pytest.mark.parametrize("gradient", [False, True])
def test_run(against, gradient):
    """The programs are the same."""

    def compiled(f):
        loss = lambda p, h: (f(p, h) ** 2).mean()
        return jax.jit(jax.grad(loss) if gradient else loss)

    ours, theirs = compiled(wrapped), compiled(plain)
    against(lambda: theirs(HAND, H), lambda: ours(LORA, H), bar=1.15, n=10)
