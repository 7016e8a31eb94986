"""Rules that follow from a type's hooks, against the dense meaning, and where they give way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.typing import ArrayLike

import morphax as mx
from morphax import errors

from .values import X, dense

I = jnp.array([1, 0, 2])
P = jnp.array([[True, False]] * 3)
Y = X[::-1] / 7


@mx.derive
class Tagged(mx.ArrayValue):
    """Twice its leaf, with a tag that two operands have to share."""

    linear = True

    half: Any
    tag: str = mx.field(static=True, default="")

    def aval(self):
        return jax.typeof(self.half)

    def __jax_array__(self):
        return self.half + self.half

    def map_parts(self, f):
        return Tagged(f(self.half), self.tag)


@mx.derive
class Masked(mx.ArrayValue):
    """NaN where it is not valid. An array goes with it, valid everywhere."""

    data: Any
    valid: Any

    def __jax_array__(self):
        return jnp.where(self.valid, self.data, jnp.nan)

    def map_parts(self, f):
        return Masked(f(self.data), f(self.valid))

    @staticmethod
    def from_array(array, like):
        return Masked(array, jnp.ones(array.shape, bool))


@mx.derive
class LowRank(mx.ArrayValue):
    """The product of two thin matrices."""

    b: Array
    a: Array

    def __jax_array__(self):
        return self.b @ self.a

    def scale_by(self, y):
        return LowRank(self.b * y, self.a) if jnp.ndim(y) == 0 else NotImplemented

    def add_to(self, other):
        return LowRank(jnp.concatenate([self.b, other.b], 1), jnp.concatenate([self.a, other.a], 0))

    def contract_with(self, y, dimension_numbers, **params):
        (axes, ys), batch = dimension_numbers
        if batch != ((), ()) or len(axes) != 1:
            return NotImplemented
        inner, outer = (self.a, self.b) if axes[0] == 1 else (self.b, self.a)
        low = lax.dot_general(inner, y, ((axes, ys), batch), **params)
        return lax.dot_general(outer, low, ((axes, (0,)), batch), **params)


tagged = Tagged(X / 2, "t")
masked = Masked(X, X > 2)
low = LowRank(X, X.T + 1)

MOVES = {
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(2, 3),
    "slice": lambda x: x[1:, :1],
    "squeeze": lambda x: x[0],
    "expand": lambda x: x[None],
    "rev": lambda x: x[::-1],
    "broadcast": lambda x: jnp.broadcast_to(x, (4, 3, 2)),
    "tile": lambda x: jnp.tile(x, (2, 2)),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "stack": lambda x: jnp.stack([x, x], 1),
    "split": lambda x: jnp.split(x, 3)[1],
    "unstack": lambda x: jnp.unstack(x)[2],
    "gather": lambda x: x[I],
    "gather, out of bounds": lambda x: jnp.take(x, jnp.array([1, 7]), axis=0),
    "gather, clipped": lambda x: jnp.take(x, jnp.array([1, 7]), axis=0, mode="clip"),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (I[0], 0), (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (I[0], 0)),
    "scatter": lambda x: x.at[I[:2]].set(x[1:]),
    "pad": lambda x: lax.pad(x, x[0, 0], ((1, 0, 0), (0, 1, 1))),
    "select_n": lambda x: jnp.where(P, x, x[::-1]),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "copy": jnp.copy,
    "diagonal": jnp.diagonal,
}

LINEAR = {
    "neg": lambda x: -x,
    "sum": lambda x: x.sum(0),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "VALID"),
    "mean": jnp.mean,
    "add": lambda x: x + x[::-1],
    "sub": lambda x: x - x.mean(0, keepdims=True),
    "scatter_add": lambda x: x.at[I[:2]].add(x[1:]),
    "astype": lambda x: x.astype(jnp.float16),
    "mul": lambda x: x * Y,
    "mul, reflected": lambda x: 3.0 * x,
    "div": lambda x: x / (Y + 1),
    "dot": lambda x: x @ Y.T,
    "dot, reflected": lambda x: Y.T @ x,
    "einsum": lambda x: jnp.einsum("ij,kjl->kil", x, jnp.ones((5, 2, 3))),
    "conv": lambda x: lax.conv_general_dilated(x[None, None], Y[None, None], (1, 1), "SAME"),
}

LOW = {
    "neg": lambda x: -x,
    "mul": lambda x: x * 2.0,
    "mul, reflected": lambda x: 2.0 * x,
    "div": lambda x: x / 2.0,
    "add": lambda x: x + x,
    "sub": lambda x: x - x * 3.0,
}


OUTSIDE = {"eager": lambda f: f, "jit": jax.jit}
INSIDE = {"": lambda f: f, "jit inside": jax.jit, "checkpoint inside": jax.checkpoint}


def kept(function, value, outside, inside):
    """The result keeps the type, and stands for what the function makes of the array."""
    got = OUTSIDE[outside](mx.wrap(INSIDE[inside](function)))(value)
    want = function(dense(value))
    assert type(got) is type(value)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(dense(got), want, rtol=1e-2 if want.dtype == jnp.float16 else 1e-5)
    return got


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("name", MOVES)
def test_elements_move_in_each_part(name, outside, inside):
    """A type of one part and one of two."""
    assert kept(MOVES[name], tagged, outside, inside).tag == "t"
    kept(MOVES[name], masked, outside, inside)


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_type_is_summed_scaled_and_contracted(name, outside, inside):
    """What is linear in the elements is so in the part."""
    assert kept(LINEAR[name], tagged, outside, inside).tag == "t"


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("name", LOW)
def test_scale_and_add(name, outside, inside):
    """From `scale_by` and `add_to`."""
    kept(LOW[name], low, outside, inside)


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ jnp.ones((3, 5)),
        lambda x: jnp.ones((5, 3)) @ x,
        lambda x: x @ jnp.ones(3),
        lambda x: jnp.ones(3) @ x,
        lambda x: jnp.einsum("ij,kil->ljk", x, jnp.ones((2, 3, 4))),
        lambda x: jax.vmap(lambda y: x @ y)(jnp.ones((4, 3, 2))),
        lambda x: jax.vmap(lambda y: y @ x, 2)(jnp.ones((2, 3, 4))),
        lambda x: jax.grad(lambda y: (y @ x).sum())(jnp.ones((4, 3))),
    ],
)
def test_contractions_on_either_side(function, outside):
    """From `contract_with`; never made dense."""
    np.testing.assert_allclose(OUTSIDE[outside](mx.wrap(function))(low), function(dense(low)), rtol=1e-5)
    assert mx.explain(mx.wrap(function))(low).materialized == ()


BATCHED = {
    "rev": jax.vmap(lambda r: r[::-1]),
    "gather": jax.vmap(lambda c: c[I], 1, 1),
    "gather, batched indices": lambda x: jax.vmap(lambda r, i: r[i])(x, I[:, None] % 2),
    "gather, batched indices only": lambda x: jax.vmap(lambda i: x[i])(I),
    "dynamic_slice": lambda x: jax.vmap(lambda r: lax.dynamic_index_in_dim(r, I[0], keepdims=False))(x),
    "select_n": jax.vmap(lambda r: jnp.where(P[0], r, r[::-1])),
    "select_n, batched predicate": lambda x: jax.vmap(lambda p: jnp.where(p, x[0], x[1]))(P),
    "stack": jax.vmap(lambda r: jnp.stack([r, r])),
    "scatter": jax.vmap(lambda r: r.at[1].set(r[0])),
    "all at once": jax.vmap(jax.jit(lambda r: jnp.pad(r, 1, mode="edge"))),
}


@pytest.mark.parametrize("value", [tagged, masked], ids=["linear", "masked"])
@pytest.mark.parametrize("name", BATCHED)
def test_batches_inside(name, value):
    """Batching gives the primitives other dimension numbers."""
    kept(BATCHED[name], value, "eager", "")
    kept(BATCHED[name], value, "jit", "")


@pytest.mark.parametrize("name", [*MOVES, *LINEAR])
def test_derivatives(name):
    """Outside, the gradient is a value; inside, the tangent passes through the same rules."""
    function = {**MOVES, **LINEAR}[name]
    shape = jax.eval_shape(function, X)
    weights = jnp.cos(jnp.arange(np.prod(shape.shape), dtype=shape.dtype)).reshape(shape.shape)

    def loss(f):
        return lambda x: jnp.nansum(dense(f(x)) * weights)

    got = jax.grad(loss(mx.wrap(function)))(tagged)
    want = jax.grad(lambda half: loss(function)(half + half))(tagged.half)
    assert type(got) is Tagged
    np.testing.assert_allclose(got.half, want, rtol=1e-2 if shape.dtype == jnp.float16 else 1e-5)
    _, tangent = mx.wrap(lambda x: jax.jvp(function, (x,), (x,)))(tagged)
    assert type(tangent) is Tagged or name == "scatter"  # whose tangent is a choice between the tangent and zeros
    np.testing.assert_allclose(dense(tangent), jax.jvp(function, (dense(tagged),), (dense(tagged),))[1], rtol=1e-2)


@pytest.mark.parametrize("value", [tagged, masked], ids=["linear", "masked"])
def test_loops_and_branches(value):
    """Scanned, carried, stacked and chosen."""

    def loop(x):
        carry, ys = lax.scan(lambda c, r: (jnp.stack([r, c[0]]), c[::-1]), x[:2], x)
        return carry, ys, lax.cond(I[0] > 0, lambda x: x.T, lambda x: x.reshape(2, 3), x)

    got = jax.jit(mx.wrap(loop))(value)
    assert all(type(x) is type(value) for x in got)
    for a, b in zip(got, loop(dense(value)), strict=True):
        np.testing.assert_allclose(dense(a), b)


def test_a_loop_stacks_the_parts_unless_there_is_more():
    """A value whose leaves all are parts; not one with a factor beside them."""

    @mx.derive
    class Scaled(mx.ArrayValue):
        array: Any
        factor: Any

        def __jax_array__(self):
            return jnp.where(self.array > 0, self.array, 0) * self.factor

        def map_parts(self, f):
            return Scaled(f(self.array), self.factor)

    def loop(x):
        return lax.scan(lambda c, r: (c, r[::-1]), 0.0, x)[1]

    assert type(mx.wrap(loop)(masked)) is Masked
    x = Scaled(X, jnp.float32(2))
    got = mx.wrap(loop)(x)
    assert isinstance(got, jax.Array)
    np.testing.assert_allclose(got, loop(2 * X))


# ------------------------------------------------------------------------------------------------ where they give way


def test_values_that_do_not_go_together_become_arrays():
    """Another tag, another type, an array without `from_array`, a value where a position is wanted."""
    other = Tagged(X, "u")
    for function in (
        lambda x, y: jnp.concatenate([x, y]),
        lambda x, y: jnp.where(P, x, y),
        lambda x, y: x + y,
        lambda x, y: x - y,
    ):
        for second in (other, masked, Y):
            got = mx.wrap(function)(tagged, second)
            assert isinstance(got, Masked | jax.Array)
            np.testing.assert_allclose(dense(got), function(dense(tagged), dense(second)))
    chosen = mx.wrap(lambda p, x: lax.select_n(p, x, x))(Tagged(P, ""), X)
    assert isinstance(chosen, jax.Array)


def test_an_array_goes_with_a_type_that_makes_values_of_arrays():
    """By `from_array`, in every operation of several elements."""
    for function in (
        lambda x: jnp.concatenate([x, Y, x]),
        lambda x: jnp.where(P, 0, x),
        lambda x: jnp.pad(x, 1),
        lambda x: x.at[0].set(5.0),
        lambda x: jnp.stack([Y, x]),
    ):
        kept(function, masked, "eager", "")
        kept(function, masked, "jit", "")


def test_out_of_bounds_without_from_array():
    """NaN is NaN in a part of floats, and zero is zero if the type is linear; any other filling is left to the array."""
    far = jnp.array([7])
    assert type(mx.wrap(lambda x: x.at[far].get(mode="fill"))(tagged)) is Tagged
    assert type(mx.wrap(lambda x: x.at[far].get(mode="fill", fill_value=0))(tagged)) is Tagged
    for value, fill in ((tagged, 3.0), (Tagged(jnp.arange(3)), None)):
        got = mx.wrap(lambda x: x.at[far].get(mode="fill", fill_value=fill))(value)
        assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, jnp.arange(3).at[far].get(mode="fill"))


def test_what_is_beside_the_parts_has_to_be_the_same():
    """A factor that is an array, though no part, is not taken from one operand for both."""

    @mx.derive
    class Scaled(mx.ArrayValue):
        array: Any
        factor: Any

        def __jax_array__(self):
            return self.array * self.factor

        def map_parts(self, f):
            return Scaled(f(self.array), self.factor)

    x = Scaled(X, jnp.float32(2))
    assert type(mx.wrap(lambda x: jnp.concatenate([x, x[:1]]))(x)) is Scaled
    got = mx.wrap(lambda x, y: jnp.concatenate([x, y]))(x, Scaled(X, jnp.float32(3)))
    assert isinstance(got, jax.Array)
    np.testing.assert_allclose(got, jnp.concatenate([2 * X, 3 * X]))
    assert isinstance(mx.wrap(lambda x: x.sum())(x), jax.Array)  # it is not said to be linear


def test_numbers_are_not_rounded_in_parts():
    """Conversion to integers and division of integers do not commute with the meaning."""
    halves = Tagged(jnp.array([0.75, 1.25]))
    np.testing.assert_array_equal(mx.wrap(lambda x: x.astype(int))(halves), [1, 2])
    np.testing.assert_array_equal(mx.wrap(lambda x: lax.div(x, 2))(Tagged(jnp.array([1, 2]))), [1, 2])
    assert type(mx.wrap(lambda x: x.sum())(Tagged(jnp.array([1, 2])))) is Tagged


def test_parts_of_another_dtype_are_moved_and_not_computed_with():
    """Integers with a scale for each: not linear in both."""

    @mx.derive
    class Ints(mx.ArrayValue):
        linear = True
        q: Any
        scale: Any
        map_parts = mx.map_leaves

        def __jax_array__(self):
            return self.q * self.scale

    x = Ints(jnp.arange(6, dtype=jnp.int8).reshape(3, 2), X)
    kept(lambda x: x.T, x, "jit", "")
    got = mx.wrap(lambda x: (x.sum(), x * 2.0))(x)
    assert all(isinstance(y, jax.Array) for y in got)
    np.testing.assert_allclose(got[0], dense(x).sum())


def test_a_low_rank_value_gives_way_to_the_array():
    """Other shapes, products element by element, batch dimensions."""
    for function in (lambda x: x * Y[0, 0] * dense(low), lambda x: x + 1.0, lambda x: x - X @ X.T, jnp.transpose):
        got = mx.wrap(function)(low)
        assert isinstance(got, jax.Array)
        np.testing.assert_allclose(got, function(dense(low)), rtol=1e-5)


@pytest.mark.parametrize("first", ["derived", "own"])
def test_an_own_rule_goes_before_the_derived_one(first):
    """Whichever came first, and whatever else it admits."""

    class V(mx.ArrayValue):
        a: Any
        map_parts = mx.map_leaves

        def __jax_array__(self):
            return self.a

    V.__qualname__ = f"V, {first}"  # unions of classes of one name are the same to beartype

    def own():
        mx.register(lax.concatenate_p)(concatenate_v)
        mx.register(lax.transpose_p)(transpose_v)
        mx.register(lax.gather_p)(gather_v)

    def concatenate_v(*xs: V | ArrayLike, dimension):
        return 42

    def transpose_v(x: V, **params):
        return 43

    def gather_v(x: V, indices: Any, **params):
        return 44

    for step in (own, lambda: mx.derive(V))[:: 1 if first == "own" else -1]:
        step()
    got = mx.wrap(lambda x: (jnp.concatenate([x, x]), x.T, x[I], x[0]))(V(X))
    assert got[:3] == (42, 43, 44)
    assert type(got[3]) is V


def test_an_own_rule_may_leave_it_to_the_derived_one():
    """By `NotImplemented`."""

    @mx.derive
    class V(mx.ArrayValue):
        a: Any
        map_parts = mx.map_leaves

        def __jax_array__(self):
            return self.a

    @mx.register(lax.rev_p)
    def rev_v(x: V, *, dimensions):
        return X if dimensions == (1,) else NotImplemented

    assert mx.wrap(lambda x: x[:, ::-1])(V(Y)) is X
    assert type(mx.wrap(lambda x: x[::-1])(V(Y))) is V


def test_subclasses_have_the_rules_with_their_own_hooks():
    """And may derive anew."""

    class Sub(Tagged):
        def map_parts(self, f):
            return Sub(f(self.half), self.tag)

    assert type(mx.wrap(lambda x: x[0] + x[1])(Sub(X))) is Sub

    @mx.derive
    class Closed(Sub):
        def scale_by(self, y):
            return NotImplemented

    assert type(mx.wrap(lambda x: x.T)(Closed(X))) is Sub
    assert type(mx.wrap(lambda x: x * Y)(Closed(X))) is Sub  # the rule of the parent's parts is the next candidate


def test_rules_are_named_by_the_hook():
    """In `explain`, with its file and line."""
    (row,) = mx.explain(mx.wrap(lambda x: x.T))(tagged).rows
    assert row.rule.startswith("Tagged.map_parts (")
    assert f"test_traits.py:{Tagged.map_parts.__code__.co_firstlineno})" in row.rule


def test_deriving_twice_changes_nothing():
    """A cell of a notebook is run again."""
    before = [len(list(mx._registry.registry.rules(p))) for p in mx.primitives.STRUCTURAL]
    assert mx.derive(Tagged) is Tagged
    assert [len(list(mx._registry.registry.rules(p))) for p in mx.primitives.STRUCTURAL] == before


def test_a_type_without_hooks_is_refused():
    """With the hooks that there are."""
    with pytest.raises(errors.RegistrationError) as error:

        @mx.derive
        class V(mx.ArrayValue):
            a: Any

            def __jax_array__(self):
                return self.a

    assert str(error.value) == (
        "`derive` found none of its hooks in `V`: `map_parts`, `scale_by`, `add_to`, `contract_with`. Define one, or write "
        "`map_parts = morphax.map_leaves` if each of its arrays has the shape of the whole."
    )


def test_a_part_of_another_shape_is_told():
    """It would be moved wrongly."""

    @mx.derive
    class V(mx.ArrayValue):
        b: Any
        a: Any
        map_parts = mx.map_leaves

        def __jax_array__(self):
            return self.b @ self.a

    with pytest.raises(errors.PartsError) as error:
        mx.wrap(lambda x: x.T)(V(X, X.T))
    assert str(error.value) == (
        "`V.map_parts` names a part of shape (3, 2), and the array has shape (3, 3). A part has the array's shape, element "
        "by element. For other layouts there are the hooks `scale_by`, `add_to` and `contract_with`, and rules."
    )


def test_leaves_of_what_is_no_pytree_are_told():
    """`map_leaves` has nothing to map over."""

    @mx.derive
    class V:
        map_parts = mx.map_leaves

        def __init__(self, a):
            self.a = a

        def __jax_array__(self):
            return self.a

    with pytest.raises(errors.PartsError, match="`V` is no pytree, so it has no leaves. Write its `map_parts"):
        mx.wrap(lambda x: x.T)(V(X))


def test_a_foreign_type_that_is_no_pytree_may_name_its_parts():
    """One operand at a time."""

    @mx.derive
    class V:
        def __init__(self, a):
            self.a = a

        def __jax_array__(self):
            return self.a

        def map_parts(self, f):
            return V(f(self.a))

    assert type(mx.wrap(lambda x: x.T[0])(V(X))) is V
    assert isinstance(mx.wrap(lambda x, y: jnp.concatenate([x, y]))(V(X), V(X)), jax.Array)


def test_parts_may_be_values():
    """Each part is bound in the dispatch, where its own rules find it."""

    @mx.derive
    class Outer(mx.ArrayValue):
        linear = True
        inner: Any

        def __jax_array__(self):
            return mx.materialize(self.inner)

        def map_parts(self, f):
            return Outer(f(self.inner))

    got = mx.wrap(lambda x: jnp.concatenate([x[::-1], x]).sum(0) * 2.0)(Outer(tagged))
    assert type(got) is Outer
    assert type(got.inner) is Tagged
    np.testing.assert_allclose(dense(got), jnp.concatenate([X[::-1], X]).sum(0) * 2)


def test_hooks_serve_loops_and_derivatives():
    """A low-rank constant of a scan, in a branch and a checkpoint: never dense, and its gradient is of low rank."""

    def function(w, x):
        def step(c, _):
            return jnp.tanh(c @ (w * 0.5)), c.sum()

        carry, sums = lax.scan(jax.checkpoint(step), x, None, 3)
        return lax.cond(sums[0] > 0, lambda w: (w @ x[0]).sum(), lambda w: 0.0, w + w) + carry.sum()

    x = jnp.ones((2, 3)) / 9
    got = jax.jit(jax.grad(mx.wrap(function)))(low, x)
    want = jax.grad(lambda w: function(w.b @ w.a, x))(low)
    assert type(got) is LowRank
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert mx.explain(jax.grad(mx.wrap(function)))(low, x).materialized == ()
