"""What happens where a value becomes an array: nothing, a warning, or an error."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import morphax as mx
from morphax import errors

from .values import Box, Exp, X

CONSTRUCTS = {
    "eager": lambda v: jnp.cos(v),
    "jit": jax.jit(lambda v: jnp.cos(v)),
    "checkpoint": jax.checkpoint(lambda v: jnp.cos(v)),
    "scan": lambda v: lax.scan(lambda c, _: (c + jnp.cos(v), None), X, None, 2)[0],
    "while_loop": lambda v: lax.fori_loop(0, 2, lambda i, c: c + jnp.cos(v), X),
    "cond": lambda v: lax.cond(True, jnp.cos, lambda v: X, v),
    "vmap": lambda v: jax.vmap(jnp.cos)(v),
    "grad": lambda v: jax.grad(lambda x: (jnp.cos(v) * x).sum())(X),
    "custom_jvp": lambda v: jax.nn.softplus(v),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_error_in_every_construct(name):
    """In the block, as an option of `wrap`, and not after it; also where the program was traced before."""
    f = CONSTRUCTS[name]
    wrapped, v = mx.wrap(f), Exp(X)
    wrapped(v)
    for _ in range(2):
        with (
            mx.materialization("error"),
            pytest.raises(errors.MaterializationError, match="has no rule and makes a dense"),
        ):
            wrapped(v)
    with pytest.raises(errors.MaterializationError):
        mx.wrap(f, materialize="error")(v)
    wrapped(v)


def test_what_rules_serve_is_no_error():
    """And neither is what an author or user asks for."""
    with mx.materialization("error"):
        assert type(mx.wrap(jax.jit(lambda v: jnp.sin(v) * 2.0))(Box(X))) is Box
        mx.wrap(lambda v: mx.materialize(v) + 1)(Box(X))
        float(mx.wrap(lambda v: jnp.sin(v))(Box(X[0, 0])).array)


def test_the_message():
    """The primitive, the types, the size, the line, the rules that came near, and the one to write."""
    with pytest.raises(errors.MaterializationError) as error:
        mx.wrap(lambda v: lax.mul(v, Exp(X)), materialize="error")(Box(X))
    lines = str(error.value).splitlines()
    assert lines[0] == "`mul` of (Box(f32[3,2]), Exp(f32[3,2])) has no rule and makes a dense array of 48 bytes."
    assert lines[1].startswith("At ") and "test_policy.py" in lines[1]
    assert lines[2].startswith("Not `mul_box_box` (") and lines[2].endswith("for (Box, Box): operand 1 is a `Exp`.")
    assert lines[-3:] == [
        "Write the rule:",
        "    @mx.register(lax.mul_p)",
        "    def mul_box_exp(x: Box, y: Exp) -> Box: ...",
    ]


def test_a_rule_that_gave_way_is_told():
    """It fits, and returned `NotImplemented`."""

    class Shy(Box):
        pass

    @mx.register(lax.cos_p)
    def cos_shy(x: Shy):
        return NotImplemented

    with pytest.raises(errors.MaterializationError, match=r"cos_shy` \(.*\) for \(Shy\): it gave way"):
        mx.wrap(lambda v: jnp.cos(v), materialize="error")(Shy(X))


def test_warnings_come_once_for_a_line():
    """Of a line that is run often, and again for another."""

    def f(v):
        for _ in range(3):
            jnp.cos(v)
        return jnp.cos(v)

    with warnings.catch_warnings(record=True) as caught, mx.materialization("warn"):
        warnings.simplefilter("always")
        mx.wrap(f)(Exp(X))
        mx.wrap(f)(Exp(X))
    assert [w.category for w in caught] == [errors.MaterializationWarning]
    with pytest.warns(errors.MaterializationWarning, match="`cos` of"):
        mx.wrap(f, materialize="warn")(Exp(X))


def test_small_arrays_may_be_made():
    """Up to a size; an array that is there already is no new one."""
    v = Exp(X)
    with mx.materialization("error", max_bytes=24):
        mx.wrap(lambda v: jnp.cos(v) + jnp.tan(v))(v)
    with mx.materialization("error", max_bytes=23), pytest.raises(errors.MaterializationError):
        mx.wrap(lambda v: jnp.cos(v))(v)


def test_a_type_may_refuse_to_be_made_dense_silently():
    """It still can be, where it is asked for."""

    class Huge(mx.ArrayValue):
        materialize = "error"
        array: jax.Array

        def __jax_array__(self):
            return self.array

    with pytest.raises(errors.MaterializationError, match='the type says `materialize = "error"`'):
        mx.wrap(lambda v: jnp.cos(v))(Huge(X))
    assert mx.wrap(lambda v: jnp.cos(mx.materialize(v)))(Huge(X)).shape == X.shape


def test_options_as_a_decorator_and_its_identity():
    """The same object for the same function and policy, so that a jit of it is reused."""

    @mx.wrap(materialize="error", max_bytes=8)
    def f(v):
        return jnp.sin(v)

    assert type(f(Box(X))) is Box
    assert f.__name__ == "f"
    assert mx.wrap(f.fn, materialize="error", max_bytes=8) is f
    assert mx.wrap(f.fn) is not f
    assert mx.wrap(f.fn) != f
    assert mx.wrap(f) is f
    assert mx.wrap(mx.wrap(f.fn), materialize="warn").policy.mode == "warn"


def test_a_policy_that_there_is_not():
    """It is told at once."""
    with pytest.raises(errors.PolicyError, match='"allow", "warn" or "error", and not \'never\''):
        mx.wrap(lambda v: v, materialize="never")
    with pytest.raises(errors.PolicyError), mx.materialization("never"):
        pass


def test_a_method_does_not_keep_its_instance():
    """What is kept for a function lives on the function."""
    import gc
    import weakref

    class Model:
        def __call__(self, v):
            return v

        def run(self, v):
            return v

    model = Model()
    mx.wrap(model.run)(Box(X))
    mx.wrap(model)(Box(X))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
