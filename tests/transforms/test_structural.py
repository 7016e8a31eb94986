"""A value that refuses to become an array, of a type without structural rules, has its elements moved in its leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import morphax as mx
from morphax import errors
from morphax.compat import quax

from ..test_traits import MOVES
from ..values import Metre, X


class Opaque(mx.ArrayValue):
    """Refuses, and has rules for elementwise products alone."""

    array: Any

    def aval(self):
        return jax.typeof(self.array)

    def __jax_array__(self):
        raise TypeError("opaque")


@mx.register(lax.mul_p)
def mul_opaque_opaque(x: Opaque, y: Opaque):
    return Opaque(lax.mul(x.array, y.array))


@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("make", [Opaque, lambda x: Metre(x, 2)], ids=["opaque", "metre"])
@pytest.mark.parametrize("name", [*MOVES, "astype"])
def test_elements_are_moved_in_the_leaf(name, make, outside):
    """And the result is a value like the one that went in."""
    function = {**MOVES, "astype": lambda x: x.astype(jnp.float16)}[name]
    got = outside(mx.wrap(function))(make(X))
    assert type(got) is type(make(X))
    assert getattr(got, "power", 2) == 2
    np.testing.assert_array_equal(got.array, function(X))


@pytest.mark.parametrize(
    "function", [jax.vmap(lambda r: r[::-1]), jax.jit(lambda x: x.T), jax.checkpoint(lambda x: x[1:])]
)
def test_inside_transformations(function):
    """As everywhere."""
    got = mx.wrap(function)(Opaque(X))
    assert type(got) is Opaque
    np.testing.assert_array_equal(got.array, function(X))


def test_a_gradient_passes_through():
    """Outside: with respect to the leaf."""

    def loss(x):
        return jnp.sum(mx.wrap(lambda x: x.T[0, 1:] * x[1:, 1])(x).array)

    got = jax.grad(loss)(Metre(X))
    np.testing.assert_array_equal(got.array, jax.grad(lambda x: (x.T[0, 1:] * x[1:, 1]).sum())(X))


Y = jnp.ones((3, 2))
REFUSED = {
    "two structures": lambda x: jnp.concatenate([x, x * x]),
    "an array beside it": lambda x: jnp.where(Y > 0, x, Y),
    "as a position": lambda x: lax.select_n(x, Y, Y),
    "rounding": lambda x: x.astype(int),
    "arithmetic": lambda x: jnp.sum(x),
    "a filling": lambda x: x.at[jnp.array([7])].get(mode="fill", fill_value=1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_computed_or_mixed(name):
    """Then the type's refusal is the error, as before."""
    value = Metre(X > 0) if name == "as a position" else Metre(X)
    with pytest.raises(errors.MaterializationError, match="the unit would be lost"):
        mx.wrap(REFUSED[name])(value)


class Inverse(mx.ArrayValue):
    """The inverse of its leaf, never computed: the leaf has the array's shape and holds none of its elements."""

    matrix: Any

    def aval(self):
        return jax.typeof(self.matrix)

    def __jax_array__(self):
        raise TypeError("never inverted")


@mx.register(lax.neg_p)
def neg_inverse(x: Inverse):
    return Inverse(-x.matrix)


class Stored(Opaque):
    """Its shape is metadata, which a moved leaf does not change."""

    shape_: tuple[int, ...] = mx.field(static=True, default=(2, 2))

    def aval(self):
        return jax.ShapeDtypeStruct(self.shape_, self.array.dtype)


class Wide(Opaque):
    """Its numbers are of another dtype than its leaf."""

    def aval(self):
        return jax.ShapeDtypeStruct(self.array.shape, jnp.float32)


@mx.register(lax.mul_p)
def mul_inverse_array(x: Inverse, y: Any):
    return Inverse(x.matrix / y) if jnp.ndim(y) == 0 else NotImplemented


@pytest.mark.parametrize(
    "value",
    [Inverse(jnp.eye(2)), Stored(jnp.eye(2)), Wide(jnp.eye(2, dtype=jnp.float16))],
    ids=["no product of two", "shape is metadata", "another dtype"],
)
def test_a_leaf_is_not_taken_for_the_elements_by_its_shape_alone(value):
    """Better an error than the rows of another matrix."""
    with pytest.raises(errors.MaterializationError, match="`slice` of .* has no rule"):
        mx.wrap(lambda x: x[0])(value)


def test_a_type_with_an_array_becomes_it():
    """Only who refuses is moved by leaf."""

    class Square(mx.ArrayValue):
        root: Any

        def __jax_array__(self):
            return self.root @ self.root

    got = mx.wrap(lambda x: x[0])(Square(jnp.eye(2) * 2))
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, [4.0, 0.0])


def test_own_rules_and_simpler_primitives_go_first():
    """A split is slices where there is a rule for those."""

    class Sliced(Opaque):
        pass

    @mx.register(lax.slice_p)
    def slice_sliced(x: Sliced, **params):
        return Opaque(x.array * 0)

    got = mx.wrap(lambda x: jnp.split(x, 3))(Sliced(X))
    assert [type(x) for x in got] == [Opaque] * 3
    assert not any(jnp.any(x.array) for x in got)


def test_quax_registers_structural_rules_for_a_type_with_an_array():
    """With leaves as parts, or with the parts that the class names."""

    @quax.register_structural
    class Two(quax.ArrayValue):
        hi: jax.Array
        lo: jax.Array

        def aval(self):
            return jax.typeof(self.hi)

        def materialise(self):
            return self.hi + self.lo

    @quax.register_structural
    class One(quax.ArrayValue):
        a: jax.Array

        def aval(self):
            return jax.typeof(self.a)

        def materialise(self):
            return self.a

        def map_parts(self, f):
            return One(f(self.a) * 1)

    for value in (Two(X, X / 8), One(X)):
        for function in (jnp.transpose, lambda x: jnp.concatenate([x[:1], x]), lambda x: jnp.where(Y > 0, x, x)):
            got = quax.quaxify(function)(value)
            assert type(got) is type(value)
            np.testing.assert_array_equal(got.materialise(), function(value.materialise()))
