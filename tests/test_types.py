"""The public types, as checkers see them: pyright reads this file too, and fails if one of these assertions does."""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from beartype import beartype
from jax import Array

import morphax as mx


class Scaled(mx.ArrayValue):
    """A dataclass to checkers: fields by position or name, frozen."""

    array: Array
    factor: float = mx.field(static=True, default=2.0)

    def __jax_array__(self) -> Array:
        return self.array * self.factor


def model(x: Array, n: int, *, flag: bool = False) -> tuple[Array, int]:
    """Some function."""
    return x * 2, n


def test_wrap_keeps_the_signature():
    """Parameters and result, as a call, a decorator, and a decorator with options."""
    wrapped = mx.wrap(model)
    got = wrapped(jnp.ones(2), 1, flag=True)
    assert_type(got, tuple[Array, int])
    assert got[1] == 1

    @mx.wrap
    def plain(x: Array) -> Array:
        return x

    @mx.wrap(materialize="error")
    def guarded(x: Array) -> Array:
        return x

    assert_type(plain(jnp.ones(2)), Array)
    assert_type(guarded(jnp.ones(2)), Array)


def test_values_are_dataclasses():
    """Fields have their types."""
    value = Scaled(jnp.ones(2), factor=3.0)
    assert_type(value.array, Array)
    assert_type(value.factor, float)
    assert_type(value.shape, tuple[int, ...])
    assert value.factor == 3.0


def test_functions():
    """What they take and give."""
    value = Scaled(jnp.ones(2))
    assert_type(mx.is_value(value), bool)
    report = mx.explain(model)(jnp.ones(2), 1)
    assert_type(report.totals, str)
    found = mx.coverage(model, jnp.ones(2), 1)
    assert_type(found.ok, bool)
    assert_type(found.stubs, str)

    @mx.register(jax.lax.cos_p)
    def cos_scaled(x: Scaled) -> Array:
        return jnp.cos(x.array * x.factor)

    kept: Callable[[Scaled], Array] = cos_scaled
    assert kept(value).shape == (2,)
    with mx.materialization("warn", max_bytes=100), mx.checking(numbers=True), mx.dispatching():
        pass


def test_jaxtyping_annotations_hold_of_values_and_tracers():
    """Outside, of the value's own type; inside, a tracer is an array."""

    @jaxtyping.jaxtyped(typechecker=beartype)
    def inside(x: jaxtyping.Float[Array, "n m"], y: jaxtyping.Float[Array, " m"]) -> jaxtyping.Float[Array, " n"]:
        return x @ y

    @jaxtyping.jaxtyped(typechecker=beartype)
    def outside(x: jaxtyping.Float[Scaled, "n m"]) -> jaxtyping.Float[Scaled, "n m"]:
        return x

    value = Scaled(jnp.ones((3, 2)))
    unmodified: Any = mx.wrap(inside)  # which says that it takes arrays
    assert unmodified(value, jnp.ones(2)).shape == (3,)
    assert outside(value) is value
    with pytest.raises(jaxtyping.TypeCheckError):
        unmodified(value, jnp.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError):
        outside(Scaled(jnp.ones(3)))
