"""Free at run time: what is traced and compiled, how often, and that it is what would have been written by hand."""

import collections
import contextlib
import gc
import re
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import morphax as mx
from morphax import _jax
from morphax.arrays import LoraArray, QuantizedArray
from morphax.rules import _body

from .values import Box, X

_seen = None


def _listen(event, duration, **kwargs):
    if _seen is not None:
        _seen[event.rsplit("/", 1)[-1]] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def compilations():
    """Count the events of JAX's compiler: tracing, lowering and compiling."""
    global _seen
    _seen = collections.Counter()
    try:
        yield _seen
    finally:
        _seen = None


class Diagonal(mx.ArrayValue):
    """A diagonal matrix, by its diagonal."""

    entries: jax.Array

    def __jax_array__(self):
        return jnp.diag(self.entries)


@mx.register(lax.dot_general_p)
def dot_general_diagonal_array(x: Diagonal, y: jax.typing.ArrayLike, *, dimension_numbers, **params):
    (lhs, rhs), batch = dimension_numbers
    if batch != ((), ()) or rhs != (0,):
        return NotImplemented
    return x.entries.reshape(-1, *[1] * (y.ndim - 1)) * y


class Quantity(mx.ArrayValue):
    """A number with a unit."""

    array: jax.Array
    unit: str = mx.field(static=True)

    def aval(self):
        return jax.typeof(self.array)

    def __jax_array__(self):
        raise TypeError("the unit would be lost")


@mx.register(lax.mul_p)
def mul_quantity_quantity(x: Quantity, y: Quantity):
    return Quantity(x.array * y.array, f"{x.unit} {y.unit}")


@mx.register(lax.add_p)
def add_quantity_quantity(x: Quantity, y: Quantity):
    return Quantity(x.array + y.array, x.unit)


@mx.register(lax.reduce_sum_p)
def reduce_sum_quantity(x: Quantity, **params):
    return Quantity(lax.reduce_sum_p.bind(x.array, **params), x.unit)


W, A, B = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(64, 48), (4, 48), (64, 4)]))
H = jax.random.normal(jax.random.key(9), (16, 64))
INT8 = QuantizedArray.quantize(W, axis=0)


def by_lora(h, w, a, b):
    return h @ w + (h @ b) @ a


def by_int8(h, q, scale):
    return lax.dot_general(h, q, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32) * scale


# Name: the function on the value, the value, the same by hand on the value's leaves.
BY_HAND = {
    "lora": (
        lambda w, h: jnp.tanh(h @ w),
        LoraArray(W, A, B, alpha=4.0, frozen=False),
        lambda leaves, h: jnp.tanh(by_lora(h, *leaves)),
    ),
    "int8": (lambda w, h: jnp.tanh(h @ w), INT8, lambda leaves, h: jnp.tanh(by_int8(h, *leaves))),
    "diagonal": (
        lambda w, h: jnp.tanh(w @ h.T),
        Diagonal(W[:, 0]),
        lambda leaves, h: jnp.tanh(leaves[0][:, None] * h.T),
    ),
    "unit": (
        lambda w, h: (w * w + w * w).sum(),
        Quantity(W, "m"),
        lambda leaves, h: (leaves[0] * leaves[0] + leaves[0] * leaves[0]).sum(),
    ),
}


def measured(f, *args):
    """Flops, bytes and the histogram of operations of the optimized program."""
    compiled = jax.jit(f).lower(*args).compile()
    cost = compiled.cost_analysis()
    operations = collections.Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", compiled.as_text()))
    return cost["flops"], cost["bytes accessed"], operations


def _number(result):
    return jnp.sum(result.array if isinstance(result, Quantity) else result)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_program_is_the_hand_written_one(name):
    """Flops, bytes accessed and operations after optimization."""
    f, value, by_hand = BY_HAND[name]
    leaves = jax.tree.leaves(value)
    got = measured(
        lambda leaves, h: _number(mx.wrap(f)(jax.tree.unflatten(jax.tree.structure(value), leaves), h)), leaves, H
    )
    assert got == measured(lambda leaves, h: _number(by_hand(leaves, h)), leaves, H)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_gradient_is_the_hand_written_one(name):
    """With respect to the plain operand and the floating leaves."""
    f, value, by_hand = BY_HAND[name]
    leaves, treedef = jax.tree.flatten(value)
    floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of_floating(function):
        def loss(some, h):
            mixed = list(leaves)
            for i, x in zip(floating, some, strict=True):
                mixed[i] = x
            return _number(function(mixed, h))

        return jax.grad(loss, (0, 1))

    some = [leaves[i] for i in floating]
    got = measured(of_floating(lambda leaves, h: mx.wrap(f)(jax.tree.unflatten(treedef, leaves), h)), some, H)
    assert got == measured(of_floating(by_hand), some, H)


def test_a_warm_call_of_a_wrapped_jit_traces_and_compiles_nothing():
    """Of new values of the same kind, too; and the first call compiles one program."""
    times = []

    @jax.jit
    def f(v, y):
        times.append(1)
        return jnp.sin(v) * y

    wrapped, others = mx.wrap(f), [X + 1, X + 2]
    y = jnp.ones(X.shape)
    with compilations() as seen:
        wrapped(Box(X), y)
    assert seen["backend_compile_duration"] == 1
    with compilations() as seen:
        for x in others:
            assert type(wrapped(Box(x), y)) is Box
            assert type(mx.wrap(f)(Box(x), y)) is Box
    assert not seen
    assert len(times) == 1


def test_a_wrapped_jit_is_what_it_was_with_options():
    """Donation, static arguments and names are those of the function; its keywords and errors, too."""
    f = mx.wrap(jax.jit(lambda v, n: v * n, static_argnums=1))
    assert type(f(Box(X), 3)) is Box
    np.testing.assert_array_equal(f(Box(X), 3).array, X * 3)
    donating = mx.wrap(jax.jit(lambda v: v * 2.0, donate_argnums=0))
    given = Box(X + 1)
    donating(given)
    assert given.array.is_deleted()
    with pytest.raises(ZeroDivisionError):
        mx.wrap(jax.jit(lambda v: 1 // 0))(Box(X))
    keyword = mx.wrap(jax.jit(lambda v, *, y: v * y))
    assert type(keyword(Box(X), y=2.0)) is Box
    with jax.disable_jit():
        assert type(keyword(Box(X), y=2.0)) is Box


def test_a_rule_for_the_function_itself_sees_its_arrays():
    """A wrapped jit with a rule is dispatched as a whole, as elsewhere."""
    seen = []

    @jax.jit
    def f(v):
        return v + 1.0

    class Own(Box):
        pass

    assert type(mx.wrap(f)(Own(X))) is not Own

    @mx.register(f)
    def f_own(x: Own):
        seen.append(x.array)
        return x

    assert type(mx.wrap(f)(Own(X))) is Own
    assert not isinstance(seen[0], jax.core.Tracer)


def test_a_wrapped_jit_returns_values_that_hold_no_arrays_only():
    """A function in a value cannot come out of a jit, and comes out of the wrapped one all the same."""

    class Held(Box):
        pass

    class Applied(mx.ArrayValue):
        array: jax.Array
        function: collections.abc.Callable

        def __jax_array__(self):
            return self.function(self.array)

    @mx.register(lax.neg_p)
    def neg_box_applied(x: Held):
        return Applied(x.array, jnp.sin)

    negated = mx.wrap(jax.jit(lambda v: -v))
    for _ in range(2):
        got = negated(Held(X))
        assert type(got) is Applied
        assert got.function is jnp.sin


class Spectral(mx.ArrayValue):
    """A weight divided by its largest singular value, by twenty steps of power iteration."""

    weight: jax.Array

    def __jax_array__(self):
        v = jnp.ones(self.weight.shape[1])
        for _ in range(20):
            u = self.weight @ v
            u = u / jnp.linalg.norm(u)
            v = u @ self.weight
            v = v / jnp.linalg.norm(v)
        return self.weight / (u @ self.weight @ v)


def loops(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        else:
            for inner in _jax.jaxprs_in(eqn.params):
                yield from loops(inner)


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_a_computed_weight_is_computed_once_for_all_steps(captured):
    """In neither the forward nor the backward loop is anything of the power iteration."""

    def run(w, h):
        return lax.scan(lambda h, _: (jnp.tanh(w @ h), None), h, None, 64)[0].sum()

    def loss(weight, h):
        w = Spectral(weight)
        return mx.wrap(lambda h: run(w, h))(h) if captured else mx.wrap(run)(w, h)

    def by_hand(weight, h):
        return run(mx.materialize(Spectral(weight)), h)

    weight, h = W[:48, :48], H[0, :48]
    for transform in (lambda f: f, jax.grad):
        got, want = (list(loops(jax.make_jaxpr(transform(f))(weight, h))) for f in (loss, by_hand))
        assert len(got) == len(want) > 0
        for ours, theirs in zip(got, want, strict=True):
            assert [e.primitive.name for e in ours.params["jaxpr"].eqns if e.primitive.name != "jit"] == [
                e.primitive.name for e in theirs.params["jaxpr"].eqns if e.primitive.name != "jit"
            ]
    np.testing.assert_allclose(jax.grad(loss)(weight, h), jax.grad(by_hand)(weight, h), rtol=1e-3, atol=1e-4)


def test_what_is_kept_is_bounded_by_what_is_alive():
    """Functions, bodies of loops and what they close over go away, and so do the programs that were kept for them."""

    def kept():
        gc.collect()
        return _body.size_of_cache()

    def call(i, big):
        f = jax.jit(lambda v: jnp.sin(v) * float(i) + big[0])
        g = mx.wrap(lambda v: lax.scan(lambda c, x: (c * x + big[1], None), v, jnp.ones(2))[0])
        mx.wrap(f)(Box(jnp.ones(())))
        jax.eval_shape(g, Box(jnp.ones(())))
        jax.eval_shape(mx.wrap(lambda v: f(v)), Box(jnp.ones(())))
        return weakref.ref(f)

    call(-1, jnp.zeros(2))
    before = kept()
    functions, arrays = [], []
    for i in range(500):
        big = jnp.zeros(2_500_000 if i % 50 == 0 else 2)  # 10 MB
        functions.append(call(i, big))
        arrays.append(weakref.ref(big))
    del big
    after = kept()
    assert not [f for f in functions if f() is not None]
    assert not [a for a in arrays if a() is not None]
    assert after <= before + 1


def test_sixteen_threads_agree_with_one():
    """They call functions of all kinds while another thread registers rules."""
    functions = [
        mx.wrap(jax.jit(lambda v, s: jnp.sin(v) * s)),
        mx.wrap(lambda v, s: lax.scan(lambda c, x: (c * x, None), v, jnp.full(3, s))[0]),
        jax.jit(mx.wrap(lambda v, s: jax.nn.relu(v) * s)),
        mx.wrap(lambda v, s: jax.grad(lambda s: (jnp.sin(v) * s).sum())(s)),
    ]
    want = [[np.asarray(mx.materialize(f(Box(X), float(i)))) for i in range(16)] for f in functions]
    faults, done = [], threading.Event()

    def call(i):
        try:
            for _ in range(5):
                for f, numbers in zip(functions, want, strict=True):
                    np.testing.assert_allclose(mx.materialize(f(Box(X), float(i))), numbers[i], rtol=1e-5)
        except Exception as error:
            faults.append(error)

    def register():
        while not done.is_set():

            class Fresh(Box):
                pass

            def tan_fresh(x: Fresh, **params):
                return x

            mx.register(lax.tan_p)(tan_fresh)
            done.wait(0.02)

    registering = threading.Thread(target=register)
    threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
    registering.start()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    done.set()
    registering.join()
    assert not faults
