"""`checking`: what rules return, against what their primitives do."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import morphax as mx
from morphax import errors

from .values import Box, X


class Bad(Box):
    """Its rules are wrong, each in another way."""


@mx.register(lax.exp_p)
def exp_bad(x: Bad, **params):
    return Bad(lax.exp(x.array).astype(jnp.float16))


@mx.register(lax.log_p)
def log_bad(x: Bad, **params):
    return Bad(lax.log(x.array)[0])


@mx.register(lax.tanh_p)
def tanh_bad(x: Bad, **params):
    return Bad(lax.tanh(x.array) + 1)


@mx.register(lax.split_p)
def split_bad(x: Bad, *, sizes, axis):
    return [Bad(part) for part in reversed(lax.split(x.array, sizes, axis))]


@mx.register(lax.abs_p)
def abs_bad(x: Bad):
    return Bad(lax.abs(x.array) * 1)


@pytest.mark.parametrize("f", [lambda v: v, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_types_are_checked(f):
    """Dtype and shape; with the rule, and what the primitive gives."""
    with mx.checking():
        with pytest.raises(
            errors.RuleResultError, match=r"exp_bad` \(.*\) for `exp` gave f16\[3,2\] as result 0.*f32\[3,2\]"
        ):
            mx.wrap(f(lambda v: jnp.exp(v)))(Bad(X))
        with pytest.raises(
            errors.RuleResultError, match=r"gave f32\[2\] as result 0, and on arrays the primitive gives f32\[3,2\]"
        ):
            mx.wrap(f(lambda v: jnp.log(v)))(Bad(X))
    mx.wrap(f(lambda v: jnp.log(v)))(Bad(X))  # and not after it


def test_several_results():
    """The one that is wrong is named."""
    with mx.checking(), pytest.raises(errors.RuleResultError, match="as result 0"):
        mx.wrap(lambda v: jnp.split(v, [1]))(Bad(X))


def test_weak_types_are_checked():
    """A weak type that is lost changes the dtypes of what comes after."""

    class Strong(Box):
        pass

    @mx.register(lax.neg_p)
    def neg_strong(x: Strong):
        return Strong(lax.neg(x.array).astype(jnp.float32))

    weak = Strong(jnp.asarray(1.0))
    assert weak.aval().weak_type
    with mx.checking(), pytest.raises(errors.RuleResultError, match=r"gives f32\[\] \(weakly typed\)"):
        mx.wrap(lambda v: -v)(weak)


def test_numbers_are_checked_on_demand():
    """Against those of the array."""
    with mx.checking():
        mx.wrap(lambda v: jnp.tanh(v))(Bad(X))
    with (
        mx.checking(numbers=True),
        pytest.raises(errors.RuleResultError, match="for `tanh` gave other numbers than the arrays"),
    ):
        mx.wrap(lambda v: jnp.tanh(v))(Bad(X))
    with mx.checking(numbers=True):
        mx.wrap(lambda v: jnp.abs(jnp.sin(v)) * 2.0)(Bad(X))
        jax.jit(mx.wrap(lambda v: jnp.tanh(v)))(Bad(X))  # in a trace they are not known


def test_the_environment_turns_it_on():
    """For the whole process, threads included."""
    code = (
        "import threading, jax.numpy as jnp, morphax as mx\n"
        "from tests.test_checking import Bad, X\n"
        "def run():\n"
        "    try: mx.wrap(lambda v: jnp.exp(v))(Bad(X))\n"
        "    except mx.errors.RuleResultError: print('caught')\n"
        "run(); t = threading.Thread(target=run); t.start(); t.join()\n"
    )
    root = os.path.dirname(os.path.dirname(__file__))
    env = {**os.environ, "MORPHAX_CHECK": "1"}
    got = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=True)
    assert got.stdout.split() == ["caught", "caught"]
