"""Array-ish types that the tests share, of the shapes that need different care."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

import morphax as mx


class Box(mx.ArrayValue):
    """One leaf, which is the array. Rules for a few primitives."""

    array: Any

    def aval(self):
        return jax.typeof(self.array)

    def __jax_array__(self):
        return self.array


class Exp(mx.ArrayValue):
    """The exponential of its leaf: not linear."""

    log: Array

    def __jax_array__(self):
        return jnp.exp(self.log)


class Product(mx.ArrayValue):
    """A product of two factors, as a low-rank matrix is: not linear."""

    u: Array
    v: Array

    def __jax_array__(self):
        return self.u * self.v


class Pair(mx.ArrayValue):
    """The sum of two leaves: linear in them."""

    hi: Array
    lo: Array

    def __jax_array__(self):
        return self.hi + self.lo


class Ints(mx.ArrayValue):
    """Integers with a scale: linear in the one floating leaf."""

    q: Array
    scale: Array

    def __jax_array__(self):
        return self.q.astype(self.scale.dtype) * self.scale


class Full(mx.ArrayValue):
    """A number with a shape that is metadata."""

    fill: Array
    size_: tuple[int, ...] = mx.field(static=True)

    def __jax_array__(self):
        return jnp.full(self.size_, self.fill)


class Zeros(mx.ArrayValue):
    """No leaf at all."""

    size_: tuple[int, ...] = mx.field(static=True)

    def __jax_array__(self):
        return jnp.zeros(self.size_)


class Metre(mx.ArrayValue):
    """A length to some power, which must not lose its unit."""

    linear = True

    array: Array
    power: int = mx.field(static=True, default=1)

    def aval(self):
        return jax.typeof(self.array)

    def __jax_array__(self):
        raise TypeError("the unit would be lost")


class Named(NamedTuple):
    """A foreign NamedTuple: the array doubled."""

    half: Array

    def __jax_array__(self):
        return 2 * self.half


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """A foreign dataclass that is a pytree: the array negated."""

    negative: Array

    def __jax_array__(self):
        return -self.negative


@mx.register_type
class Plain:
    """A foreign object that is no pytree."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


@mx.register(lax.sin_p)
def sin_box(x: Box, **params):
    return Box(lax.sin(x.array))


@mx.register(lax.neg_p)
def neg_box(x: Box):
    return Box(lax.neg(x.array))


@mx.register(lax.mul_p)
def mul_box_box(x: Box, y: Box):
    return Box(lax.mul(x.array, y.array))


@mx.register(lax.mul_p)
def mul_box_array(x: Box, y: ArrayLike):
    return Box(lax.mul(x.array, y))


@mx.register(lax.mul_p)
def mul_array_box(x: ArrayLike, y: Box):
    return Box(lax.mul(x, y.array))


@mx.register(lax.add_p)
def add_box_box(x: Box, y: Box):
    return Box(lax.add(x.array, y.array))


@mx.register(lax.mul_p)
def mul_metre_metre(x: Metre, y: Metre):
    return Metre(lax.mul(x.array, y.array), x.power + y.power)


@mx.register(lax.mul_p)
def mul_metre_array(x: Metre, y: ArrayLike):
    return Metre(lax.mul(x.array, y), x.power)


@mx.register(lax.mul_p)
def mul_array_metre(x: ArrayLike, y: Metre):
    return Metre(lax.mul(x, y.array), y.power)


@mx.register(lax.add_p)
def add_metre_metre(x: Metre, y: Metre):
    if x.power != y.power:
        raise ValueError(f"cannot add m^{x.power} and m^{y.power}")
    return Metre(lax.add(x.array, y.array), x.power)


X = jnp.arange(1.0, 7.0).reshape(3, 2)

MATERIALIZABLE = {
    "one leaf": Box(X),
    "nonlinear": Exp(X / 6),
    "product": Product(X, X + 1),
    "several leaves": Pair(X, X / 8),
    "integer leaf": Ints(jnp.arange(6).reshape(3, 2).astype(jnp.int8), jnp.float32(0.5)),
    "static shape": Full(jnp.float32(2.0), (3, 2)),
    "no leaf": Zeros((3, 2)),
    "nested": Box(Pair(X, X / 8)),
    "NamedTuple": Named(X),
    "dataclass": Data(X),
    "no pytree": Plain(X),
}


def dense(tree):
    """Materialize every value in a pytree."""
    return jax.tree.map(mx.materialize, tree, is_leaf=mx.is_value)
