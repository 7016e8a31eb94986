"""`coverage`: what would be made dense, why, and the rules to write."""

import jax
import jax.numpy as jnp
from jax import lax

import morphax as mx

from .values import Box, Exp, X


def test_gaps_are_told_with_reasons_and_stubs():
    """Grouped by the kinds of operands, and nothing runs."""
    value = Exp(jax.ShapeDtypeStruct((1 << 16, 1 << 16), "float32"))
    found = mx.coverage(lambda v, x: jnp.cos(v) + jnp.cos(v) + v.sum(0) @ x, value, jnp.ones(1 << 16))
    assert not found.ok
    gaps = {gap.operation: gap for gap in found.gaps}
    assert set(gaps) == {"cos", "reduce_sum"}
    assert (gaps["cos"].count, gaps["cos"].bytes) == (2, 1 << 34)
    assert gaps["reduce_sum"].bytes == 0  # the array is there already
    assert "test_coverage.py" in gaps["cos"].lines[0]
    assert gaps["cos"].stub == "@mx.register(lax.cos_p)\ndef cos_exp(x: Exp) -> Exp: ..."
    assert gaps["reduce_sum"].stub == "@mx.register(lax.reduce_sum_p)\ndef reduce_sum_exp(x: Exp, *, axes) -> Exp: ..."
    assert str(found).splitlines()[-1] == "0 by rules, 3 materialized (17,179,869,184 bytes)"


def test_stubs_run_and_close_the_gaps():
    """Filled in, they are rules that fit."""

    class Fresh(Box):
        pass

    f = lambda v, x: lax.concatenate([v, x], 0)
    found = mx.coverage(f, Fresh(X), X)
    assert found.stubs == (
        "@mx.register(lax.concatenate_p)\n"
        "def concatenate_fresh_array(x: Fresh, y: ArrayLike, *, dimension) -> Fresh: ..."
    )
    body = found.stubs.replace("...", "return Fresh(lax.concatenate([x.array, y], dimension))")
    exec(body, {"mx": mx, "lax": lax, "Fresh": Fresh, "ArrayLike": jax.typing.ArrayLike})
    closed = mx.coverage(f, Fresh(X), X)
    assert closed.ok and closed.served == 1 and closed.stubs == ""


def test_reasons_name_the_rules_that_came_near():
    """With the operand that does not fit, nearest first."""
    (gap,) = mx.coverage(lambda v, w: lax.mul(v, w), Box(X), Exp(X)).gaps
    assert gap.reasons[0].endswith("for (Box, Box): operand 1 is a `Exp`.")
    assert all("Box" in reason for reason in gap.reasons)


def test_a_construct_that_needs_an_array_gets_no_stub():
    """No rule would help there."""
    found = mx.coverage(
        lambda v: lax.scan(lambda c, r: (c, None), 0.0, v)[0], mx.arrays.QuantizedArray.quantize(X, axis=0)
    )
    gaps = {gap.operation: gap for gap in found.gaps}
    assert gaps["scan"].stub == ""
