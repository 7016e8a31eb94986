"""Code written for Quax runs on this package's core."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.typing import ArrayLike

import morphax as mx
from morphax.compat import quax

X = jnp.arange(1.0, 4.0)


class Box(quax.ArrayValue):
    """An `equinox.Module`: converters and static fields are Equinox's."""

    a: jax.Array = eqx.field(converter=jnp.asarray)
    tag: str = eqx.field(static=True, default="")

    def aval(self):
        return jax.typeof(self.a)

    def materialise(self):
        return self.a


class Hidden(quax.ArrayValue):
    """Refuses to become an array."""

    a: jax.Array

    def aval(self):
        return jax.typeof(self.a)

    def materialise(self):
        raise TypeError("hidden")


@quax.register(lax.mul_p)
def _(x: Box, y: ArrayLike, **params):
    return Box(lax.mul(x.a, jnp.asarray(y, x.a.dtype)), x.tag)


@quax.register(lax.mul_p)
def _(x: ArrayLike, y: Box, **params):
    return Box(lax.mul(jnp.asarray(x, y.a.dtype), y.a), y.tag)


@quax.register(lax.mul_p)
def _(x: Hidden, y: Hidden, **params):
    return Hidden(lax.mul(x.a, y.a))


@quax.register(lax.add_p)
def _(x: Hidden, y: Hidden, **params):
    return Hidden(lax.add(x.a, y.a))


def test_values_are_modules_and_values():
    """With shape, dtype and the rest."""
    v = Box([1.0, 2.0, 3.0], "t")
    assert isinstance(v, eqx.Module)
    assert mx.is_value(v)
    assert (v.shape, v.dtype, v.ndim, v.size) == ((3,), jnp.float32, 1, 3)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_quaxify_dispatches_and_materialises(wrap):
    """Rules where there are some, arrays elsewhere."""
    out = wrap(quax.quaxify(lambda v: v * 2.0))(Box(X, "t"))
    assert type(out) is Box
    assert out.tag == "t"
    np.testing.assert_allclose(wrap(quax.quaxify(jnp.sin))(Box(X)), jnp.sin(X), rtol=1e-6)


def test_operators_dispatch_outside():
    """In either order."""
    for out in (Box(X) * X, X * Box(X), 2.0 * Box(X), np.ones(3, np.float32) * Box(X)):
        assert type(out) is Box


def test_a_refusing_value_names_the_primitive():
    """And its own reason."""
    with pytest.raises(mx.errors.MaterializationError, match=r"`tan` of \(Hidden\) has no rule.*hidden"):
        quax.quaxify(jnp.tan)(Hidden(X))


def test_a_scan_keeps_a_refusing_type():
    """Carry and stacked results."""
    c, ys = quax.quaxify(lambda init, xs: lax.scan(lambda c, x: (c + x, c * x), init, xs))(
        Hidden(jnp.float32(1)), Hidden(X)
    )
    assert (type(c), type(ys)) == (Hidden, Hidden)
    np.testing.assert_allclose(ys.a, [1.0, 4.0, 12.0])


def test_the_inherited_default_materialises_and_an_override_decides():
    """As documented by Quax: one override decides, two are an error."""

    class One(Box):
        @staticmethod
        def default(primitive: Any, values: Any, params: Any) -> Any:
            return Box(X * 0)

    class Two(Box):
        @staticmethod
        def default(primitive: Any, values: Any, params: Any) -> Any:
            return Box(X * 0)

    assert type(quax.quaxify(lax.sub)(One(X), Box(X))) is Box
    with pytest.raises(mx.errors.AmbiguousDefaultError, match="`One.default` and `Two.default`"):
        quax.quaxify(lax.sub)(One(X), Two(X))
    np.testing.assert_allclose(quax.Value.default(lax.neg_p, [Box(X)], {}), -X)


def test_filter_spec_leaves_arguments_as_they_are():
    """They reach a nested call raw."""
    seen = []
    quax.quaxify(lambda v, w: seen.append((v, w)), filter_spec=(True, (True, False), True))(Box(X), Box(X))
    ((v, w),) = seen
    assert isinstance(v, jax.core.Tracer)
    assert type(w) is Box


def test_rules_on_arrays_alone_apply_to_arrays():
    """Their annotations say so."""

    @quax.register(lax.bessel_i1e_p)
    def _(x: ArrayLike, **params):
        return lax.bessel_i1e(x) + 1

    np.testing.assert_allclose(quax.quaxify(lambda x: lax.bessel_i1e(x))(X), lax.bessel_i1e(X) + 1, rtol=1e-6)
    mx.register(lax.bessel_i1e_p, plain=True, override=True)(_declines)  # rules last as long as the process


def _declines(x: ArrayLike, **params):
    return NotImplemented
