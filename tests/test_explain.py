"""`explain`: what dispatched, and what was made dense."""

import jax
import jax.numpy as jnp
import pytest

import morphax as mx
from morphax._events import OBSERVERS

from .values import Box, Exp, X


def test_rules_and_materialization_are_told_apart():
    """Counted, with types, shapes and places."""
    found = mx.explain(lambda v: jnp.cos(jnp.sin(v)) + jnp.sin(v))(Box(X))
    by_operation = {r.operation: r for r in found.rows}
    assert set(by_operation) == {"sin", "cos", "add"}
    sin = by_operation["sin"]
    assert (sin.operands, sin.result, sin.count) == (("Box(f32[3,2])",), "Box(f32[3,2])", 2)
    assert sin.rule.startswith("sin_box (") and "values.py:" in sin.rule
    assert {r.operation for r in found.materialized} == {"cos", "add"}
    assert "test_explain.py" in by_operation["add"].line


def test_it_looks_inside_constructs():
    """Also into programs that are kept from earlier calls, and into inner wraps."""
    f = jax.jit(lambda v: jnp.sin(v) * 2.0)
    mx.wrap(f)(Box(X))
    for function in (
        f,
        jax.checkpoint(f),
        lambda v: mx.wrap(f)(v),
        lambda v: jax.vmap(f)(v),
        lambda v: jax.jvp(f, (v,), (v,)),
    ):
        found = mx.explain(mx.wrap(function))(Box(X))
        assert any(r.operation == "sin" for r in found.rows), function
        assert not [r for r in found.materialized if r.operation == "sin"]


def test_a_gradient_outside_is_followed():
    """`explain` of a function that wraps inside `grad`."""
    loss = lambda v: mx.materialize(mx.wrap(lambda v: jnp.sin(v))(v)).sum()
    assert [r.operation for r in mx.explain(jax.grad(loss))(Box(X)).rows] == ["sin"]


def test_nothing_runs():
    """Abstract values suffice."""
    found = mx.explain(lambda v: jnp.exp(v))(Exp(jax.ShapeDtypeStruct((1 << 20, 1 << 20), "float32")))
    assert len(found.materialized) == 1


def test_printed_it_is_a_table():
    """With a line of totals."""
    text = str(mx.explain(lambda v: jnp.sin(v) + 1)(Box(X)))
    lines = text.splitlines()
    assert lines[0].split() == ["count", "operation", "operands", "result", "bytes", "rule", "line"]
    assert lines[-1] == "1 by rules, 1 materialized (24 bytes)"


def test_to_dict():
    """For programs."""
    (row,) = mx.explain(jax.jit(lambda v: jnp.sin(v)))(Box(X)).to_dict()
    assert set(row) == {"operation", "operands", "rule", "result", "bytes", "line", "count"}


def test_an_exception_ends_the_watching():
    """Nothing is watched after it."""
    with pytest.raises(KeyError):
        mx.explain(lambda v: {}[v])(1)
    assert OBSERVERS.get() == ()


def test_operators_of_raw_values_do_not_hide_the_rest():
    """They dispatch by themselves; the function is wrapped all the same."""
    assert {r.operation for r in mx.explain(lambda v: (v * 2.0, jnp.exp(v)))(Box(X)).rows} == {"mul", "exp"}


def test_what_is_traced_for_a_shape_is_not_told():
    """The default of `aval` traces `__jax_array__`, and computes nothing."""

    class Nested(mx.ArrayValue):
        inner: object

        def __jax_array__(self):
            return self.inner * 2.0

    assert mx.explain(mx.wrap(lambda v: v))(Nested(Box(X))).rows == ()


def test_partitioned_values_pass():
    """A value of which only some leaves are there is what `equinox.partition` gives."""
    import equinox as eqx

    w = mx.arrays.LoraArray.init(jnp.ones((4, 4)), 2, key=jax.random.key(0))
    spec = eqx.tree_at(lambda v: (v.a, v.b), jax.tree.map(lambda _: False, w), (True, True))
    trainable, frozen = eqx.partition(w, spec)

    def loss(trainable, frozen, x):
        return jnp.sum(mx.wrap(lambda w, x: x @ w.T)(eqx.combine(trainable, frozen), x))

    assert not mx.explain(jax.grad(loss))(trainable, frozen, jnp.ones((3, 4))).materialized


def test_a_function_that_is_not_for_raw_values():
    """To `vmap` a raw value is a container; wrapped it is an array."""
    q = mx.arrays.QuantizedArray.quantize(jnp.ones((3, 6, 4)), axis=-1)
    found = mx.explain(jax.vmap(lambda w, x: x @ w, (2, 0)))(q, jnp.ones((4, 3)))
    assert found.rows


def test_errors_of_wrapped_functions_are_raised():
    """They are the user's to see."""
    with pytest.raises(KeyError):
        mx.explain(lambda v: mx.wrap(lambda v: {}[v])(1))(Box(X))
