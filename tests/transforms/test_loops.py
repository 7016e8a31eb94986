"""Loops and branches: what keeps its structure, what is settled, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import morphax as mx
from morphax import _jax, errors

from ..values import Box, Exp, Full, Metre, Pair, Product, X


def test_an_unchanged_carry_keeps_its_type():
    """In `scan`, `while_loop` and `fori_loop`, and where the body rebuilds it."""
    assert type(mx.wrap(lambda v: lax.scan(lambda c, _: (c * 2.0, None), v, None, 3)[0])(Box(X))) is Box
    assert type(mx.wrap(lambda v: lax.fori_loop(0, 3, lambda i, c: c * 2.0, v))(Box(X))) is Box
    loop = lambda v: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, v))[1]
    assert type(mx.wrap(loop)(Box(X))) is Box
    assert type(mx.wrap(lambda v: lax.scan(lambda c, x: (c, v), 0.0, X)[1])(Box(X))) is Box


def test_xs_and_ys_by_leaf_where_the_meaning_follows():
    """A value of one leaf is sliced and stacked by leaf; a product of leaves too, since it is elementwise."""
    out = mx.wrap(lambda v: lax.scan(lambda c, r: (c, r), 0.0, v)[1])(Product(X, X))
    assert type(out) is Product
    np.testing.assert_allclose(mx.materialize(out), X * X)


def test_only_the_slot_that_changes_is_settled():
    """The other one keeps its type."""

    def body(c, _):
        return (c[0] * 2.0, jnp.cos(c[1])), None

    a, b = mx.wrap(lambda v, w: lax.scan(body, (v, w), None, 3)[0])(Box(X), Box(X))
    assert type(a) is Box
    assert isinstance(b, jax.Array)
    np.testing.assert_allclose(b, jnp.cos(jnp.cos(jnp.cos(X))), rtol=1e-5)


def test_a_unit_survives_loops():
    """It refuses to become an array, and needs not to."""
    total = lambda init, xs: lax.scan(lambda c, x: (c + x, c * 2.0), init, xs)
    for f in (mx.wrap(total), jax.jit(mx.wrap(total)), mx.wrap(jax.jit(total))):
        c, ys = f(Metre(jnp.float32(1)), Metre(jnp.arange(3.0)))
        assert (type(c), type(ys)) == (Metre, Metre)
        np.testing.assert_allclose(c.array, 4.0)
        np.testing.assert_allclose(ys.array, [2.0, 2.0, 4.0])


def test_a_carry_that_cannot_be_settled_is_an_error():
    """It names the loop, the slot, both structures and the line."""
    with pytest.raises(errors.StructureError) as error:
        mx.wrap(lambda v: lax.fori_loop(0, 3, lambda i, c: c * c, v))(Metre(X))
    text = str(error.value)
    assert text.startswith(
        "the carry changed structure: slot 1 of `scan` enters the body as PyTreeDef(CustomNode(Metre[(1,)], [*])) and leaves it as"
    )
    assert "PyTreeDef(CustomNode(Metre[(2,)], [*]))" in text
    assert "the unit would be lost" in text
    assert "test_loops.py" in text
    assert text.endswith("Let the body return the value as it got it.")


def test_an_array_that_becomes_a_unit_is_an_error():
    """The carry enters as an array and would leave as something that no array can stand for."""
    with pytest.raises(
        errors.StructureError, match="has to be an array, since it does not leave the body as it entered it"
    ):
        mx.wrap(lambda v: lax.fori_loop(0, 3, lambda i, c: v * 1.0, X))(Metre(X))


class Litre(mx.ArrayValue):
    """A volume; an array that has to be one is read in its unit."""

    array: jax.Array
    unit: str = mx.field(static=True)

    def aval(self):
        return jax.typeof(self.array)

    def __jax_array__(self):
        raise TypeError("the unit would be lost")

    @staticmethod
    def from_array(array, like):
        return Litre(array.astype(like.array.dtype), like.unit)


@mx.register(lax.mul_p)
def mul_litre_any(x: Litre, y: jax.typing.ArrayLike):
    return Litre(lax.mul(x.array, y), x.unit)


def test_an_array_that_becomes_a_value_may_enter_as_one():
    """`from_array` says how, and is told what the value will be."""
    v = Litre(X, "l")
    for loop in (
        lambda v: lax.fori_loop(0, 3, lambda i, c: v * 2.0, X),
        lambda v: lax.scan(lambda c, _: (v * 2.0, None), X, None, 3)[0],
        lambda v: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, v * 2.0), (0, X))[1],
    ):
        got = mx.wrap(loop)(v)
        assert (type(got), got.unit) == (Litre, "l")
        np.testing.assert_array_equal(got.array, X * 2)
    unmoved = mx.wrap(lambda v: lax.fori_loop(0, 0, lambda i, c: v * 2.0, X))(v)
    np.testing.assert_array_equal(unmoved.array, X)


def test_branches_that_cannot_be_settled_are_an_error():
    """A length in one branch, an area in the other."""
    with pytest.raises(
        errors.StructureError, match="the branches of `cond` return values of different structure as result 0"
    ):
        mx.wrap(lambda v: lax.cond(X[0, 0] > 0, lambda v: v, lambda v: v * v, v))(Metre(X))


def test_branches_that_agree_keep_their_type():
    """And those that do not give an array."""
    assert type(mx.wrap(lambda v: lax.cond(X[0, 0] > 0, lambda v: v * 2.0, lambda v: v, v))(Box(X))) is Box
    assert isinstance(mx.wrap(lambda v: lax.cond(X[0, 0] > 0, lambda v: jnp.cos(v), lambda v: v, v))(Box(X)), jax.Array)


def test_hooks_for_the_leading_axis():
    """A type whose leaves do not show its leading axis says how it is sliced and stacked."""

    class Rows(mx.ArrayValue):
        """``n`` equal rows."""

        row: jax.Array
        n: int = mx.field(static=True)

        def aval(self):
            return jax.core.ShapedArray((self.n, *self.row.shape), self.row.dtype)

        def __jax_array__(self):
            return jnp.broadcast_to(self.row, (self.n, *self.row.shape))

        def take_leading(self, i):
            return Box(self.row)

    out = mx.wrap(lambda v: lax.scan(lambda c, r: (c, jnp.sin(r)), 0.0, v)[1])(Rows(X[0], 3))
    assert type(out) is Box
    np.testing.assert_allclose(out.array, jnp.sin(jnp.broadcast_to(X[0], (3, 2))), rtol=1e-6)


def test_a_constant_of_a_loop_is_materialized_once_before_it():
    """Forward and in the gradient: the exponential of the weight is not in the loop."""

    class Exp(mx.ArrayValue):
        log: jax.Array

        def __jax_array__(self):
            return jnp.exp(self.log)

    def run(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(w * c), None), x, None, 4)[0].sum()

    for f in (mx.wrap(run), jax.grad(mx.wrap(run))):
        jaxpr = jax.make_jaxpr(f)(Exp(X / 6), X)
        inside = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
        assert inside
        assert not any("exp" in str(e.params["jaxpr"]) for e in inside)
        assert "exp" in {e.primitive.name for e in jaxpr.eqns}


def test_repeated_eager_loops_do_not_compile_again():
    """The same body functions, called again."""
    body, cond, step = (lambda c, x: (c + x, None)), (lambda s: s[0] < 3), (lambda s: (s[0] + 1, s[1] * 2.0))
    yes, no = (lambda v: v * 2.0), (lambda v: v * 3.0)
    functions = (
        lambda v: lax.scan(body, v, jnp.ones(3))[0],
        lambda v: lax.while_loop(cond, step, (0, v))[1],
        lambda v: lax.cond(True, yes, no, v),
    )
    for f in functions:
        wrapped = mx.wrap(f)
        value = Box(jnp.ones(()))
        for _ in range(2):
            wrapped(value)
        with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
            compiled = []
            import logging

            patch.setattr(
                logging.getLogger("jax._src.interpreters.pxla"), "handle", lambda record: compiled.append(record)
            )
            wrapped(value)
        assert not compiled


def test_parameters_of_loops_are_kept():
    """Reverse, unroll, length; the platforms of a choice."""
    scan = lambda w: lax.scan(lambda c, x: (c, w * x), 0.0, X, reverse=True, unroll=3)
    (eqn,) = [e for e in jax.make_jaxpr(mx.wrap(scan))(Pair(X, X)).eqns if e.primitive.name == "scan"]
    assert (eqn.params["reverse"], eqn.params["unroll"], eqn.params["length"]) == (True, 3, 3)
    choice = lambda w: lax.platform_dependent(w, cpu=lambda w: w * 2.0, default=lambda w: w * 3.0)
    (eqn,) = [e for e in jax.make_jaxpr(mx.wrap(choice))(Box(X)).eqns if e.primitive.name == "cond"]
    (want,) = [e for e in jax.make_jaxpr(choice)(X).eqns if e.primitive.name == "cond"]
    assert eqn.params["branches_platforms"] == want.params["branches_platforms"]


def test_effects_in_a_loop_run_once_a_step():
    """Tracing a body again to settle it runs nothing."""
    seen = []

    def step(c):
        jax.debug.callback(lambda i: seen.append(int(i)), c[0])
        return c[0] + 1, jnp.cos(c[1])

    mx.wrap(lambda v: lax.while_loop(lambda c: c[0] < 3, step, (0, v)))(Box(X))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2]


def test_vmap_over_a_value_whose_shape_is_metadata():
    """It is batched as the array that it stands for."""
    out = mx.wrap(jax.vmap(lambda c, x: c + x))(Full(jnp.float32(5), (3, 2)), X)
    np.testing.assert_allclose(out, 5 + X)


NORM = jax.jit(lambda w: jnp.sqrt((w * w).sum()))


@pytest.mark.parametrize(
    "captures",
    [
        lambda w, y: mx.wrap(lambda w, y: _loop(w, y))(w, y),
        lambda w, y: mx.wrap(lambda y: _loop(w, y))(y),
        lambda w, y: mx.wrap(lambda y: jax.jit(lambda y: _loop(w, y))(y))(y),
    ],
    ids=["an argument", "captured", "captured in a jit"],
)
def test_what_a_loop_makes_dense_is_made_dense_once_before_it(captures):
    """In an operator, and in a jitted function, of an argument or a captured value; forward and in the gradient."""

    def exponentials(f, *args):
        program = jax.make_jaxpr(f)(*args)
        loops = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
        return str(program).count(" exp "), sum(str(eqn.params).count(" exp ") for eqn in loops)

    w, y = Exp(X[:2]), X[0]
    assert exponentials(captures, w, y) == (1, 0)
    assert exponentials(lambda y: captures(w, y), y) == (1, 0)
    assert exponentials(jax.grad(lambda y: captures(w, y).sum()), y) == (1, 0)
    np.testing.assert_allclose(captures(w, y), _loop(jnp.exp(X[:2]), y), rtol=1e-5)


def equations(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in _jax.jaxprs_in(eqn.params):
            yield from equations(inner)


def _loop(w, y):
    return lax.scan(lambda c, _: (jnp.tanh(NORM(w) + w @ c), None), y, None, 4)[0]
