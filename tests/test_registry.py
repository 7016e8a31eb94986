"""Rules: how they are chosen, what they are given, and what is refused."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.vale import Is
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float

import morphax as mx
from morphax import errors

from .values import Box, X, dense


def make(name="V"):
    """A fresh type of one leaf, so that tests do not share rules."""

    class V(mx.ArrayValue):
        a: Any

        def aval(self):
            return jax.typeof(self.a)

        def __jax_array__(self):
            return self.a

    V.__name__ = name
    return V


def test_the_most_specific_rule_wins():
    """As plum decides."""
    V = make()

    class Sub(V):
        pass

    @mx.register(lax.cos_p)
    def cos_v(x: V, **params):
        return V(x.a)

    @mx.register(lax.cos_p)
    def cos_sub(x: Sub, **params):
        return Sub(x.a)

    assert type(mx.wrap(jnp.cos)(V(X))) is V
    assert type(mx.wrap(jnp.cos)(Sub(X))) is Sub


def test_string_annotations_may_name_local_classes():
    """The module has `from __future__ import annotations`, so all of these tests say so; an unknown name is told."""
    with pytest.raises(
        errors.RegistrationError, match="the annotation 'Unknown' of 'x' in the rule .* cannot be evaluated"
    ):

        @mx.register(lax.cos_p)
        def rule(x: Unknown):
            return x


def test_a_rule_beside_a_literal_or_any_array():
    """`ArrayLike` admits what JAX binds: arrays, tracers, NumPy, scalars."""
    V = make()

    @mx.register(lax.mul_p)
    def mul_v_array(x: V, y: ArrayLike):
        return V(lax.mul(x.a, jnp.asarray(y, x.a.dtype)))

    for y in (2.0, 2, True, np.float32(2), np.int64(2), np.ones((3, 2), np.float32), jnp.float32(2), X):
        assert type(mx.wrap(lambda v: jnp.multiply(v, y))(V(X))) is V
        assert type(mx.wrap(jax.jit(lambda v, y: jnp.multiply(v, y)))(V(X), y)) is V


@pytest.mark.parametrize("order", [0, 1])
def test_the_same_rule_eagerly_and_under_jit(order):
    """`jax.Array` is decided on the operand, tracer or not, in whatever order the calls come."""
    V = make()

    @mx.register(lax.atan2_p)
    def with_array(x: V, y: jax.Array):
        return V(x.a * 0 + 1)

    @mx.register(lax.atan2_p)
    def with_any(x: V, y: Any):
        return V(x.a * 0 + 2)

    f = mx.wrap(lambda v, y: lax.atan2(v, y))
    calls = [lambda: f(V(X), X), lambda: jax.jit(f)(V(X), X)]
    for call in calls[:: 1 - 2 * order]:
        assert float(call().a[0, 0]) == 1


def test_value_dependent_types_are_resolved_each_time():
    """A rule for some values of a type only."""
    V = make()
    Long = Annotated[V, Is[lambda v: v.a.shape[0] > 2]]

    @mx.register(lax.cos_p)
    def short(x: V, **params):
        return V(x.a * 0)

    @mx.register(lax.cos_p)
    def long(x: Long, **params):
        return V(x.a * 0 + 1)

    f = mx.wrap(jnp.cos)
    assert [float(f(V(jnp.zeros(n))).a[0]) for n in (2, 3, 2, 3)] == [0, 1, 0, 1]


def test_jaxtyping_annotations_are_resolved_each_time():
    """So shapes can choose."""
    V = make()

    @mx.register(lax.mul_p)
    def by_vector(x: V, y: Float[Array, "n"]):
        return V(x.a * 0)

    @mx.register(lax.mul_p)
    def by_matrix(x: V, y: Float[Array, "m n"]):
        return V(x.a * 0 + 1)

    f = mx.wrap(lax.mul)
    assert [float(f(V(x), x).a.ravel()[0]) for x in (X[0], X, X[0])] == [0, 1, 0]


def test_not_implemented_tries_the_next_candidate():
    """Then the type's default, and last the array."""
    V = make()

    class Sub(V):
        pass

    @mx.register(lax.cos_p)
    def cos_v(x: V, **params):
        return V(x.a) if x.a.ndim == 2 else NotImplemented

    @mx.register(lax.cos_p)
    def cos_sub(x: Sub, **params):
        return NotImplemented

    assert type(mx.wrap(jnp.cos)(Sub(X))) is V
    np.testing.assert_array_equal(mx.wrap(jnp.cos)(Sub(X[0])), jnp.cos(X[0]))


def test_default_of_the_type_serves_where_no_rule_does():
    """`default` is asked when exactly one operand type has it."""

    class V(mx.ArrayValue):
        a: Any

        def __jax_array__(self):
            return self.a

        @staticmethod
        def default(primitive, operands, params):
            return NotImplemented if primitive is lax.sin_p else V(jnp.zeros(3))

    assert type(mx.wrap(jnp.cos)(V(X))) is V
    np.testing.assert_array_equal(mx.wrap(jnp.sin)(V(X)), jnp.sin(X))


def test_two_defaults_are_an_error():
    """Neither can decide for the other."""

    class D1(Box):
        @staticmethod
        def default(primitive, operands, params):
            return 1

    class D2(Box):
        @staticmethod
        def default(primitive, operands, params):
            return 2

    with pytest.raises(errors.AmbiguousDefaultError) as error:
        mx.wrap(lax.sub)(D1(X), D2(X))
    assert str(error.value) == (
        "`sub` of (D1, D2) has no rule, and `D1.default` and `D2.default` both claim it. Register a rule for these types: "
        "`@morphax.register(lax.sub_p)`."
    )


def test_ambiguity_names_both_rules_and_the_way_out():
    """And `precedence` is that way."""
    A, B = make("A"), make("B")

    def rule_a(x: A, y: ArrayLike | mx.ArrayValue):
        return x

    def rule_b(x: ArrayLike | mx.ArrayValue, y: B):
        return y

    mx.register(lax.sub_p)(rule_a)
    mx.register(lax.sub_p)(rule_b)
    with pytest.raises(errors.AmbiguousRuleError) as error:
        mx.wrap(lax.sub)(A(X), B(X))
    text = str(error.value)
    assert text.startswith("`sub` of (A, B) fits several rules, and none is more specific: `")
    assert "rule_a` (" in text
    assert "rule_b` (" in text
    assert text.endswith(
        "Register a rule for (A, B), or give the one that should win `@register(sub_p, precedence=1)`."
    )

    mx.register(lax.sub_p, override=True, precedence=1)(rule_b)
    assert type(mx.wrap(lax.sub)(A(X), B(X))) is B


def test_a_second_rule_for_a_signature_is_refused_unless_override():
    """Silently replacing a rule is how libraries break each other."""
    V = make()

    @mx.register(lax.cos_p)
    def first(x: V, **params):
        return V(x.a)

    with pytest.raises(errors.DuplicateRuleError, match=r"`cos` has a rule for \(V\) already: .*first.*override=True"):

        @mx.register(lax.cos_p)
        def second(x: V, **params):
            return V(x.a)

    @mx.register(lax.cos_p, override=True)
    def third(x: V, **params):
        return V(x.a + 1)

    np.testing.assert_array_equal(mx.wrap(jnp.cos)(V(X)).a, X + 1)


def test_parameters_by_name_and_neutral_ones_left_out():
    """A rule takes the parameters it names; those it does not must be neutral."""
    V = make()

    @mx.register(lax.broadcast_in_dim_p)
    def broadcast(x: V, *, shape, broadcast_dimensions):
        return V(lax.broadcast_in_dim(x.a, shape, broadcast_dimensions))

    @mx.register(lax.cumsum_p)
    def cumsum(x: V, *, axis):
        return V(lax.cumsum(x.a, axis))

    assert mx.wrap(lambda v: jnp.broadcast_to(v, (4, 3, 2)))(V(X)).shape == (4, 3, 2)
    assert type(mx.wrap(lambda v: lax.cumsum(v, 0))(V(X))) is V
    with pytest.raises(errors.RuleParameterError) as error:
        mx.wrap(lambda v: lax.cumsum(v, 0, reverse=True))(V(X))
    assert "cumsum` (" in str(error.value)
    assert str(error.value).endswith(
        "for `cumsum` does not take the parameter 'reverse', and reverse=True changes the result. Name it in the rule's "
        "signature (`*, reverse`), or take all with `**params`."
    )


def test_one_rule_for_a_family_is_given_the_primitive():
    """`register(p, q, ...)` with a keyword `primitive`."""
    V = make()

    @mx.register(*mx.primitives.REDUCTIONS)
    def reduce(x: V, *, primitive, axes, **params):
        return V(primitive.bind(x.a, axes=axes, **params))

    for f in (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.argmax):
        out = mx.wrap(lambda v: f(v, axis=0))(V(X))
        assert type(out) is V
        np.testing.assert_array_equal(dense(out), f(X, axis=0))


def test_plain_rules_apply_to_arrays_only_where_asked_for():
    """In jitted functions too, and they do not meet themselves."""
    seen = []

    @mx.register(lax.cosh_p, plain=True)
    def cosh_array(x: ArrayLike, **params):
        seen.append(1)
        return lax.cosh(x) + 1

    f = jax.jit(lambda x: lax.cosh(x))
    np.testing.assert_allclose(mx.wrap(lambda x: lax.cosh(x))(X), jnp.cosh(X) + 1)
    np.testing.assert_allclose(mx.wrap(f)(X), jnp.cosh(X) + 1)
    np.testing.assert_allclose(f(X), jnp.cosh(X))
    assert len(seen) == 2
    mx.register(lax.cosh_p, plain=True, override=True)(_back_to_cosh)


def _back_to_cosh(x: ArrayLike, **params):
    return NotImplemented


def test_a_rule_that_admits_arrays_does_not_apply_to_arrays_alone():
    """`V | ArrayLike` says what may stand beside a value."""
    V = make()

    @mx.register(lax.concatenate_p)
    def concatenate(*xs: V | ArrayLike, dimension):
        return V(lax.concatenate([getattr(x, "a", x) for x in xs], dimension))

    assert isinstance(mx.wrap(lambda x: jnp.concatenate([x, x]))(X), jax.Array)
    assert type(mx.wrap(lambda v: jnp.concatenate([v, X, v]))(V(X))) is V
    assert mx.wrap(lambda: jnp.ones(3))().shape == (3,)


def test_a_rule_without_a_value_type_is_refused():
    """It would never run."""
    with pytest.raises(errors.RegistrationError, match="names no array-ish type, so it would never run"):

        @mx.register(lax.cos_p)
        def rule(x: ArrayLike):
            return x


def test_what_cannot_have_rules_is_refused():
    """No primitive, a custom derivative call, an inlined function."""
    V = make()

    def rule(x: V):
        return x

    with pytest.raises(errors.RegistrationError) as error:
        mx.register(3)(rule)
    assert str(error.value) == (
        "`register` takes primitives, and 3 is not one. Primitives end in `_p`: `@register(jax.lax.sin_p)`."
    )
    for function in (jax.nn.softmax, jnp.mean, jnp.einsum, jnp.linalg.lstsq, jnp.std):
        with pytest.raises(errors.RegistrationError, match="does not arrive as one bind"):
            mx.register(function)(rule)
    (eqn,) = jax.make_jaxpr(jax.nn.relu)(X).eqns
    with pytest.raises(errors.RegistrationError, match="a rule for `custom_jvp_call` would never run"):
        mx.register(eqn.primitive)(rule)
    with pytest.raises(errors.RegistrationError, match="`register` needs the primitive"):
        mx.register()


def test_results_are_checked():
    """None, no array, one for many: named with the rule."""
    V = make()

    @mx.register(lax.cos_p)
    def my_cos_rule(x: V, **params):
        return None

    @mx.register(lax.tan_p)
    def my_tan_rule(x: V, **params):
        return "x"

    @mx.register(lax.sort_p)
    def my_sort_rule(x: V, **params):
        return x

    for f, told in (
        (
            jnp.cos,
            r"my_cos_rule` \(.*test_registry.py:\d+\) for `cos` returned None, which is no array. Is the `return`",
        ),
        (jnp.tan, r"my_tan_rule` \(.*\) for `tan` returned a `str`, which is no array. Return an array or a value."),
        (lax.sort, r"`sort` has several results, and the rule .*my_sort_rule.* returned a `V`. Return a list of them."),
    ):
        with pytest.raises(errors.RuleResultError, match=told):
            mx.wrap(f)(V(X))


def test_a_rule_that_comes_back_to_itself_is_an_error():
    """It is named, where recursion would only exhaust the stack."""
    V = make()

    @mx.register(lax.cos_p)
    def cos_v(x: V, **params):
        return lax.cos(x)

    with pytest.raises(
        errors.RecursiveRuleError, match=r"cos_v` \(.*\) for `cos` came back to itself .*morphax.material"
    ):
        mx.wrap(jnp.cos)(V(X))


def test_a_rule_registered_later_is_seen():
    """Kept programs are kept by the registry's version."""
    V = make()
    f = mx.wrap(jax.jit(lambda v: lax.asinh(v)))
    assert isinstance(f(V(X)), jax.Array)

    @mx.register(lax.asinh_p)
    def asinh_v(x: V, **params):
        return V(x.a)

    assert type(f(V(X))) is V


def test_function_rules():
    """A whole jitted function, called with default arguments, inside and outside other functions."""
    V = make()

    @mx.register(jnp.linalg.solve)
    def solve_v(a: V, b: ArrayLike):
        return b * 0 + 42.0

    @mx.register(jnp.linalg.cholesky)
    def cholesky_v(a: V):
        return V(a.a * 0 + 7)

    A = jnp.eye(3) * 2
    for wrapped in (mx.wrap(jnp.linalg.solve), mx.wrap(jax.jit(lambda a, b: jnp.linalg.solve(a, b)))):
        np.testing.assert_array_equal(wrapped(V(A), jnp.ones(3)), jnp.full(3, 42.0))
    assert type(mx.wrap(jnp.linalg.cholesky)(V(A))) is V
    # An option leaves no mark but in the program, which is then another.
    np.testing.assert_allclose(
        mx.wrap(lambda a: jnp.linalg.cholesky(a, upper=True))(V(A)), jnp.linalg.cholesky(A, upper=True)
    )
    np.testing.assert_allclose(jnp.linalg.solve(A, jnp.ones(3)), jnp.ones(3) / 2)


def test_a_function_rule_returns_what_the_function_returns():
    """None is told, as for a primitive."""
    V = make()

    @mx.register(jnp.linalg.inv)
    def inv_v(a: V):
        a.a + 1

    with pytest.raises(errors.RuleResultError, match=r"inv` has 1 results, and its rule returned 0: None\."):
        mx.wrap(jnp.linalg.inv)(V(jnp.eye(2)))


def test_naming_a_foreign_class_in_a_rule_registers_it():
    """So it lifts when it is captured."""

    class Foreign:
        def __init__(self, a):
            self.a = a

        def __jax_array__(self):
            return self.a

    @mx.register(lax.acosh_p)
    def acosh_foreign(x: Foreign, **params):
        return Foreign(x.a + 1)

    captured = Foreign(X)
    assert type(mx.wrap(lambda: lax.acosh(captured))()) is Foreign
    np.testing.assert_allclose(jnp.acosh(captured), jnp.acosh(X))
