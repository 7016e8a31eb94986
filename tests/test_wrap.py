"""`wrap`, and the ways in and out of it."""

import functools
import gc
import inspect
import threading
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

import morphax as mx
from morphax import _jax, errors

from .values import MATERIALIZABLE, Box, Data, Metre, Named, Pair, Plain, Product, X, dense


def test_it_is_the_same_object_for_the_same_function():
    """So that a `jit` of it reuses its program."""

    def f(x):
        return x

    assert mx.wrap(f) is mx.wrap(f)
    assert mx.wrap(mx.wrap(f)) is mx.wrap(f)

    @functools.wraps(f)
    def g(x):
        return x + 1

    np.testing.assert_array_equal(mx.wrap(g)(X), X + 1)


def test_jit_of_a_fresh_wrapper_reuses_the_program():
    """Traced once, called four times."""
    traced = []

    def f(x):
        traced.append(1)
        return x * x

    for _ in range(4):
        jax.jit(mx.wrap(f))(Box(X))
    assert len(traced) == 1


def test_a_function_and_its_wrapper_are_freed_together():
    """No global table keeps them."""

    def f(x):
        return x

    mx.wrap(f)
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is None


def test_name_documentation_and_signature_are_kept():
    """For people and for `jit`'s static arguments."""

    def f(x, *, k=2):
        """Doc."""
        return x * k

    q = mx.wrap(f)
    assert (q.__name__, q.__doc__, q.__module__) == ("f", "Doc.", __name__)
    assert list(inspect.signature(q).parameters) == ["x", "k"]
    assert type(jax.jit(q, static_argnames="k")(Box(X), k=3)) is Box


def test_as_a_method_decorator():
    """The instance is an argument like any other."""

    class Model(eqx.Module):
        w: Box

        @mx.wrap
        def twice(self, x):
            return jnp.multiply(self.w, x)

    assert type(Model(Box(X)).twice(2.0)) is Box


def test_it_is_a_pytree_of_the_models_arrays():
    """`filter_jit` and `filter_grad` take a wrapped model."""

    class Model(eqx.Module):
        w: Box

        def __call__(self, x):
            return jnp.multiply(self.w, x).sum()

    wrapped = mx.wrap(Model(Box(X)))
    assert len(jax.tree.leaves(wrapped)) == 1
    np.testing.assert_array_equal(eqx.filter_jit(lambda m, x: m(x))(wrapped, 2.0), 2 * X.sum())
    np.testing.assert_array_equal(eqx.filter_grad(lambda m: m(2.0))(wrapped).fn.w.array, 2 * jnp.ones_like(X))


def test_equality_bears_any_operand():
    """Comparison with anything is a bool."""
    assert (mx.wrap(jnp.sin) == 3) is False
    assert mx.wrap(jnp.sin) != X
    assert mx.wrap(jnp.sin) == mx.wrap(jnp.sin)


def test_what_is_not_callable_is_refused():
    """The message shows both things that were probably meant."""
    with pytest.raises(TypeError) as error:
        mx.wrap(Box(X))
    assert str(error.value) == (
        "`wrap` takes a function, and got a `Box`. To call a function on values, write `wrap(f)(value, x)`; to make one "
        "value an array, `asarray(value)`."
    )


def test_dense_results_are_plain_arrays():
    """So eager control flow works as in plain JAX."""

    def f(v):
        y = jnp.cos(v)
        assert isinstance(y, jax.Array)
        assert not isinstance(y, jax.core.Tracer)
        return float(y.sum()) + int(jnp.argmax(y)) + np.asarray(y)[0, 0] + (1 if y[0, 0] > 0 else 2)

    np.testing.assert_allclose(mx.wrap(f)(Box(X)), f(X), rtol=1e-6)


def test_concrete_values_are_concrete():
    """A value whose parts are concrete converts, branches and masks."""

    def f(v):
        s = v[0, 0] if not isinstance(v, jax.core.Tracer) else jnp.multiply(v, 1.0)[0, 0]
        out = float(s) + complex(s).real + int(s) + s.item() + np.asarray(s) + np.asarray(s.tolist())
        if s > 0:
            out = out + 1
        return out + X[v > 2].sum() + jnp.nonzero(v)[0].sum() + jnp.unique(v).size

    assert f(Box(X)) == mx.wrap(f)(Box(X)) == f(X)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(mx.wrap(lambda v: float(v.sum())))(Box(X))


def test_plain_arrays_beside_values_stay_plain():
    """Law: an operation without a value goes past the dispatch."""

    def f(v, x):
        assert not isinstance(jnp.sin(x), jax.core.Tracer)
        mask = x > 2
        return x[mask].sum() + (v * 2.0).sum()

    np.testing.assert_array_equal(mx.wrap(f)(Box(X), X), X[X > 2].sum() + 2 * X.sum())


@pytest.mark.parametrize("value", MATERIALIZABLE.values(), ids=MATERIALIZABLE)
def test_values_anywhere_in_the_arguments(value):
    """In containers, keywords, `partial`, a module that is called, a bound method, a captured variable."""
    expected = X * mx.materialize(value)

    class Model(eqx.Module):
        w: object

        def __call__(self, x):
            return jnp.multiply(x, self.w)

    calls = (
        lambda: mx.wrap(lambda p, *, y: jnp.multiply(p["x"], y[0]))({"x": X}, y=(value,)),
        lambda: mx.wrap(functools.partial(jnp.multiply, value))(X),
        lambda: mx.wrap(Model(value))(X),
        lambda: mx.wrap(Model(value).__call__)(X),
        lambda: mx.wrap(lambda m: m(X))(Model(value)),
        lambda: mx.wrap(lambda: jnp.multiply(X, value))(),
        lambda: mx.wrap(jax.jit(lambda: jnp.multiply(X, value)))(),
        lambda: mx.wrap(jax.vmap(lambda x: jnp.multiply(x, mx.asarray(value)), in_axes=0, out_axes=0))(X[None])[0],
    )
    for call in calls:
        np.testing.assert_allclose(dense(call()), expected, rtol=1e-6)


def test_captured_values_dispatch():
    """Rules serve what was closed over, in `jit`, `vmap`, `grad` and `checkpoint` too."""
    w = Box(X)
    for f in (
        lambda: jnp.sin(w),
        jax.jit(lambda: jnp.sin(w)),
        lambda: lax.sin(w),
        lambda: w * w,
        lambda: jax.checkpoint(lambda: jnp.sin(w))(),
    ):
        assert type(mx.wrap(f)()) is Box
    rows = mx.explain(lambda: jax.grad(lambda x: (x * jnp.sin(w)).sum())(2.0))().rows
    assert any(r.operation == "sin" and "sin_box" in r.rule for r in rows)


def test_a_captured_value_in_a_jitted_function_wherever_it_was_traced_first():
    """One trace serves all calls, inside and outside of `wrap`."""
    w = Box(X)
    traced = []

    @jax.jit
    def f(x):
        traced.append(1)
        return jnp.sin(w) * x

    for _ in range(2):
        assert type(mx.wrap(f)(2.0)) is Box
        np.testing.assert_allclose(f(2.0), 2 * jnp.sin(X))
    assert type(jax.jit(mx.wrap(lambda x: f(x)))(2.0)) is Box
    assert len(traced) == 1


def test_a_captured_value_is_materialized_once():
    """Ten uses, one `__jax_array__`."""
    asked = []

    class Counting(Box):
        def __jax_array__(self):
            asked.append(1)
            return self.array

    w = Counting(X)
    mx.wrap(lambda: sum(jnp.cos(w).sum() for _ in range(10)))()
    assert len(asked) == 1


def test_values_inside_values():
    """A rule's operations on a nested value dispatch again; the result may be nested too."""
    out = mx.wrap(lambda v: jnp.sin(v) * 2.0)(Box(Box(X)))
    assert type(out) is Box
    assert type(out.array) is Box
    np.testing.assert_allclose(out.array.array, 2 * jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(mx.wrap(jnp.cos)(Box(Box(Pair(X, X)))), jnp.cos(2 * X), rtol=1e-6)


def test_a_value_built_from_tracers_inside():
    """User code may make values of what it was given."""
    out = mx.wrap(lambda v: jnp.sin(Box(v)))(Box(X))
    assert type(out) is Box
    assert type(out.array) is Box
    assert type(mx.wrap(lambda v: Box(jnp.sin(v)))(Box(X)).array) is Box


def test_asarray_of_numbers_gives_arrays():
    """Inside as outside, and in rules."""
    out = mx.wrap(lambda v: [jnp.asarray(np.ones(2)), jnp.asarray(2.0), jnp.asarray(v)])(Box(X))
    assert isinstance(out[0], jax.Array)
    assert isinstance(out[1], jax.Array)
    assert type(out[2]) is Box


def test_nested_wraps():
    """Each call has its own tracers."""
    assert type(mx.wrap(lambda v: mx.wrap(jnp.sin)(v))(Box(X))) is Box
    w = Box(X)
    assert type(mx.wrap(lambda v: mx.wrap(jnp.multiply)(w, v))(Box(X))) is Box


@pytest.mark.parametrize("value", [Named(X), Data(X), Plain(X)], ids=["NamedTuple", "dataclass", "object"])
def test_foreign_classes_dispatch_as_arguments(value):
    """All that is required is `__jax_array__`."""
    cls = type(value)
    if cls not in _foreign_rules:
        _foreign_rules.add(cls)

        def sinh_foreign(x: cls, **params):
            return cls(jnp.zeros(3))

        mx.register(lax.sinh_p)(sinh_foreign)
    assert type(mx.wrap(lambda v: lax.sinh(v))(value)) is cls
    np.testing.assert_allclose(mx.wrap(jax.jit(jnp.cos))(value), jnp.cos(mx.materialize(value)), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(mx.wrap(lambda: jnp.cos(value)))(), jnp.cos(mx.materialize(value)), rtol=1e-6)


_foreign_rules: set[type] = set()


def test_dispatching_makes_operations_dispatch_without_a_wrapper():
    """Results are taken out with `unwrap`."""
    w = Box(X)
    with mx.dispatching():
        y = mx.unwrap({"y": jnp.sin(w), "x": X})
        assert isinstance(jnp.cos(w), jax.Array)
    assert type(y["y"]) is Box
    assert y["x"] is X
    assert not isinstance(jnp.sin(w), Box)
    with pytest.raises(KeyError), mx.dispatching():
        raise KeyError


def test_install_and_uninstall():
    """The lasting form, of this thread."""
    mx.install()
    try:
        mx.install()
        y = mx.unwrap(jnp.sin(Box(X)))
    finally:
        mx.uninstall()
    mx.uninstall()
    assert type(y) is Box
    assert _jax.trace_ctx.trace is _jax.eval_trace


def test_asarray_gives_array_semantics_to_a_captured_value():
    """A transformation takes a raw value for the container that it is."""
    w = Pair(X, X)
    np.testing.assert_allclose(mx.wrap(lambda: jax.vmap(lambda row: row.sum())(mx.asarray(w)))(), (2 * X).sum(1))


def test_an_attribute_that_arrays_lack_is_the_values():
    """Inside, metadata can be read; what neither has is told."""
    assert mx.wrap(lambda v: v.power)(Metre(X, 2)) == 2
    with pytest.raises(AttributeError, match="neither arrays nor `Metre` have an attribute 'unit'"):
        mx.wrap(lambda v: v.unit)(Metre(X, 2))
    assert not mx.wrap(lambda v: hasattr(v, "_private"))(Metre(X, 2))


def test_an_escaped_tracer_is_refused_with_the_way_out():
    """In a later operation, a later `jit` and a later `wrap`."""
    box = []
    mx.wrap(lambda v: box.append(v))(Box(X))
    for use in (
        lambda: box[0] + 1,
        lambda: jax.jit(lambda: box[0] + 1)(),
        lambda: mx.wrap(lambda v: jnp.cos(box[0]) + v)(Box(X)),
    ):
        with pytest.raises(jax.errors.UnexpectedTracerError, match=r"`morphax.unwrap\(tracer\)` before"):
            use()


def test_an_exception_leaves_no_trace():
    """JAX's state is as before, also while the traceback is kept."""

    def bad(v):
        raise KeyError

    for f in (bad, jax.jit(bad), jax.vmap(bad), jax.grad(bad), jax.checkpoint(bad)):
        with pytest.raises(KeyError):
            mx.wrap(f)(Box(X))
        assert _jax.trace_ctx.trace is _jax.eval_trace


def test_refusing_values_say_what_was_wanted():
    """The primitive, the operand types, the user's line, the cause, and the rule to write."""
    with pytest.raises(errors.MaterializationError) as error:
        mx.wrap(lambda v, x: lax.atan2(v, x))(Metre(X), X)
    text = str(error.value)
    assert text.startswith(
        "`atan2` of (Metre, f32[3,2]) has no rule, so its values had to become arrays, and one refuses: a `Metre` had to "
        "become an array, and its `__jax_array__` raised TypeError: the unit would be lost\nAt "
    )
    assert "test_wrap.py" in text
    assert text.endswith(
        "Write the rule:\n    @mx.register(lax.atan2_p)\n    def atan2_metre_array(x: Metre, y: ArrayLike) -> Metre: ..."
    )
    assert isinstance(error.value.__cause__, TypeError)


def test_a_refusal_while_lifting_reaches_the_user():
    """JAX would replace the message of a `TypeError`."""
    for f in (lambda: lax.tan(Metre(X)), lambda: jnp.tan(Metre(X))):
        with pytest.raises(errors.MaterializationError, match="the unit would be lost"):
            f()


def test_typed_keys():
    """Keys have no numbers to compute with, and pass."""
    key = jr.key(0)
    np.testing.assert_array_equal(mx.wrap(lambda k: jr.normal(k, (3,)))(Box(key)), jr.normal(key, (3,)))
    assert type(mx.wrap(lambda k, v: v * jr.normal(k, (3, 2)))(key, Box(X))) is Box


def test_threads_agree():
    """Eight threads call one wrapped function while another registers rules."""
    f = mx.wrap(jax.jit(lambda v, s: jnp.sin(v) * s))
    expected = [jnp.sin(X) * i for i in range(8)]
    faults = []

    def call(i):
        for _ in range(10):
            out = f(Box(X), float(i))
            if type(out) is not Box or not np.allclose(out.array, expected[i], rtol=1e-5):
                faults.append(i)

    def add_rules():
        for _ in range(10):

            class Fresh(Box):
                pass

            mx.register(lax.tan_p)(_rule_for(Fresh))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)] + [threading.Thread(target=add_rules)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not faults


def _rule_for(cls):
    def tan_fresh(x: cls, **params):
        return x

    return tan_fresh


def test_nothing_leaks():
    """Under `checking_leaks`, with rules, materialization and captured values."""
    w = Product(X, X)
    with jax.checking_leaks():
        mx.wrap(lambda v: jax.nn.relu(jnp.sin(v)) + jnp.cos(w))(Box(X))
        jax.jit(mx.wrap(jax.jit(lambda v: jax.nn.gelu(v) * 2)))(w)


def test_a_leak_is_told():
    """Under `checking_leaks`, with who holds the tracer; it would be refused wherever it is used."""
    held = []
    with (
        jax.checking_leaks(),
        pytest.warns(UserWarning, match=r"a tracer outlives the wrapped call that made it: Leaked trace"),
    ):
        mx.wrap(lambda v: held.append(v))(Box(X))


def test_jax_enable_checks():
    """Jaxprs and tracers type-check."""
    with jax.enable_checks(True):
        jax.jit(mx.wrap(jax.jit(lambda v: jax.nn.relu(jnp.sin(v)))))(Box(X))
