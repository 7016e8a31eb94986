"""What an operation costs: eagerly, in a trace, beside values, and what a value costs to make."""

import jax
import jax.numpy as jnp
from jax import lax

import morphax as mx

from ..values import Box, Pair, X

N = 100


def chain(x):
    """300 operations."""
    for _ in range(N):
        x = lax.sin(x)
        x = lax.add(x, x)
        x = lax.mul(x, x)
    return x


def mostly_plain(v, x):
    """One operation on the value, and 300 on arrays."""
    return chain(lax.sin(v).sum() + x)


def traced(f, *args):
    """Trace the function anew."""
    return lambda: jax.make_jaxpr(lambda *args: f(*args))(*args) and None


def test_eager_operations(against):
    """On a value of one leaf."""
    against(lambda: chain(X), lambda: mx.wrap(chain)(Box(X)), bar=2.2)


def test_traced_operations(against):
    """On a value of one leaf."""
    against(traced(chain, X), traced(mx.wrap(chain), Box(X)), bar=2.0)


def test_traced_operations_on_arrays(against):
    """In a wrapped function that meets no value."""
    against(traced(chain, X), traced(mx.wrap(chain), X), bar=1.1)


def test_traced_operations_beside_a_value(against):
    """Where one was met before."""
    against(traced(mostly_plain, X, X), traced(mx.wrap(mostly_plain), Box(X), X), bar=1.3)


def test_eager_operations_beside_a_value(against):
    """Where one was met before."""
    against(lambda: mostly_plain(X, X), lambda: mx.wrap(mostly_plain)(Box(X), X), bar=1.4)


def test_eager_functions_of_jax_numpy(against):
    """Jits that JAX inlines; plain JAX calls them in C++."""
    against(lambda: jnp.multiply(X, X), lambda: mx.wrap(jnp.multiply)(Box(X), X), bar=20, n=200)


def test_making_values(against):
    """Of one leaf and of two, against tuples."""
    against(
        lambda: [((X,), (X, X)) for _ in range(200)] and None,
        lambda: [(Box(X), Pair(X, X)) for _ in range(200)] and None,
        bar=15,
    )


def test_flattening_values(against):
    """Through JAX's pytrees, against tuples."""
    values, tuples = [Pair(X, X)] * 200, [(X, X)] * 200
    flat, treedef = jax.tree.flatten(values)
    plain_treedef = jax.tree.structure(tuples)
    against(
        lambda: plain_treedef.unflatten(jax.tree.leaves(tuples)) and None,
        lambda: treedef.unflatten(jax.tree.leaves(values)) and None,
        bar=30,
    )
    assert len(flat) == 400


def test_import(benchmark):
    """Over `import jax`, in seconds, in a process of its own."""
    import subprocess
    import sys

    code = "import jax, jax.numpy, time; t = time.perf_counter(); import morphax; print(time.perf_counter() - t)"
    seconds = sorted(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))[1]
    benchmark.extra_info["seconds over jax"] = seconds
    benchmark.pedantic(lambda: None)
    assert seconds < 0.6
