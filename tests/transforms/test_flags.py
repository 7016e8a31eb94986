"""The law under JAX's configuration: experimental forms of its constructs, checks, no jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import morphax as mx

from ..values import MATERIALIZABLE, X, dense
from .test_law import DIFFERENTIABLE, FUNCTIONS, PYTREES, Y, check, check_trees, total

KINDS = ("one leaf", "product", "integer leaf")
FORMS = {  # under each flag the construct is one primitive that carries its rules
    "jax_custom_jvp3": ("custom_jvp", "custom_jvp in jit", "relu", "gelu", "scan of custom_jvp"),
    "jax_custom_vjp3": ("custom_vjp", "custom_vjp in jit", "scan of custom_vjp"),
    "jax_remat3": ("checkpoint", "checkpoint returning the value", "scan of checkpoint"),
    "jax_scan3": ("scan, constant", "scan, changed carry", "scan, xs", "scan, ys", "map", "scan in jit"),
}
EXPERIMENTAL = [
    (flag, name, kind) for flag, names in FORMS.items() if hasattr(jax.config, flag) for name in names for kind in KINDS
]


@pytest.fixture
def flag(request):
    """Set a flag for one test; nothing traced before counts."""
    before = getattr(jax.config, request.param)
    jax.clear_caches()
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, before)
    jax.clear_caches()


@pytest.mark.parametrize(("flag", "name", "kind"), EXPERIMENTAL, indirect=["flag"])
def test_experimental_forms(flag, name, kind):
    """Forward, and the gradients with respect to the value's leaves and the plain operand."""
    function, value = FUNCTIONS[name], MATERIALIZABLE[kind]
    check(mx.wrap(function)(value, Y), function(mx.materialize(value), Y))
    if flag == "jax_scan3":  # JAX has not given it derivatives
        return
    got = jax.grad(lambda w, y: total(mx.wrap(function))(w, y), (0, 1), allow_int=True)(value, Y)
    want = jax.grad(lambda w, y: total(function)(mx.materialize(w), y), (0, 1), allow_int=True)(value, Y)
    check_trees(got, want)


@pytest.mark.parametrize("flag", ["jax_enable_checks"], indirect=True)
@pytest.mark.parametrize(
    "name", ["jit", "checkpoint", "custom_jvp", "custom_vjp", "scan, xs", "while_loop", "cond", "cg"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_with_checks(flag, name, kind):
    """Jaxprs and tracers type-check."""
    function, value = FUNCTIONS[name], MATERIALIZABLE[kind]
    check(jax.jit(mx.wrap(function))(value, Y), function(mx.materialize(value), Y))
    if kind in DIFFERENTIABLE and name != "while_loop":
        jax.grad(total(mx.wrap(function)), allow_int=True)(value, Y)


NOT_JITTED = [name for name in FUNCTIONS if name != "scan, length 0"]  # which JAX refuses there


@pytest.mark.parametrize("name", NOT_JITTED)
def test_without_jit(name):
    """`disable_jit` runs the bodies of constructs in Python, on the values themselves."""
    function, value = FUNCTIONS[name], MATERIALIZABLE["product"]
    with jax.disable_jit():
        check(mx.wrap(function)(value, Y), function(mx.materialize(value), Y))


@pytest.mark.parametrize("value", PYTREES.values(), ids=PYTREES)
def test_compile_time_evaluation(value):
    """What depends on known arrays alone is known, beside a value and in a jit outside."""

    def function(w, y):
        with jax.ensure_compile_time_eval():
            known = jnp.arange(3).sum()
            assert int(known) == 3
        return w * y + known

    check(mx.wrap(function)(value, Y), function(mx.materialize(value), Y))
    check(jax.jit(mx.wrap(function))(value, Y), function(mx.materialize(value), Y))


@pytest.mark.parametrize("value", PYTREES.values(), ids=PYTREES)
def test_shapes_and_programs_without_running(value):
    """`eval_shape`, `lower` and `compile` outside and inside."""
    function = FUNCTIONS["eager"]
    want = jax.eval_shape(function, X, Y)
    got = jax.eval_shape(mx.wrap(function), value, Y)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    compiled = jax.jit(mx.wrap(function)).lower(value, Y).compile()
    check(compiled(value, Y), function(mx.materialize(value), Y))
    inside = mx.wrap(lambda w, y: jax.eval_shape(function, w, y))(value, Y)
    assert inside.shape == want.shape


@pytest.mark.parametrize("value", MATERIALIZABLE.values(), ids=MATERIALIZABLE)
def test_pallas(value):
    """A kernel reads memory of an array's shape, so that a value becomes its array."""

    def kernel(w_ref, y_ref, out_ref):
        out_ref[...] = w_ref[...] * y_ref[...]

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=True)
    check(mx.wrap(call)(value, Y), mx.materialize(value) * Y)


@pytest.mark.parametrize("value", MATERIALIZABLE.values(), ids=MATERIALIZABLE)
def test_callbacks(value):
    """Python is called with arrays, as often and in the order as without values."""
    seen = []

    def function(w, y):
        jax.debug.callback(lambda a: seen.append(np.asarray(a).sum()), w, ordered=True)
        jax.debug.print("{w} {y}", w=w.sum(), y=y.sum())
        z = jax.experimental.io_callback(
            lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(y.shape, y.dtype), w, ordered=True
        )
        return z + y

    got = mx.wrap(function)(value, Y)
    jax.effects_barrier()
    array = mx.materialize(value)
    check(got, 2 * array + Y)
    np.testing.assert_allclose(seen, [array.sum()])
    mx.wrap(jax.jit(function))(value, Y)
    jax.effects_barrier()
    assert len(seen) == 2


@pytest.mark.parametrize("value", MATERIALIZABLE.values(), ids=MATERIALIZABLE)
def test_what_depends_on_numbers(value):
    """Branches, conversions, masks and shapes that follow from data work on values, and on arrays beside them."""

    def function(w, y):
        if w.sum() > 0:
            y = y + 1
        mask = np.asarray(w > 1)
        return (
            y * float(w.sum()) + int(y.sum()),
            w[mask],
            y[y > 1],
            jnp.nonzero(w),
            jnp.unique(w),
            jnp.unique(y),
            jnp.where(y > 1),
            jax.ops.segment_sum(w, jnp.array([0, 1, 1])),
        )

    check(mx.wrap(function)(value, Y), function(mx.materialize(value), Y))


SOLVERS = ("cg", "gmres", "bicgstab")


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_lazy_operator_is_never_made_dense_by_a_solver(solver):
    """Its product with a vector is taken in every iteration; forward, in the gradient, and in a jit."""
    from .test_dispatch import Matrix

    left = jnp.arange(8.0).reshape(4, 2) / 9
    operator = Matrix(left, left.T)
    b = jnp.linspace(1, 2, 4)
    solve = getattr(jax.scipy.sparse.linalg, solver)

    def function(w, b):
        return solve(lambda v: 2 * v + w @ v, b, tol=1e-6)[0]

    array = left @ left.T
    for run in (mx.wrap(function), jax.jit(mx.wrap(function)), mx.wrap(jax.jit(function))):
        np.testing.assert_allclose(run(operator, b), function(array, b), rtol=1e-4)
    got = jax.grad(lambda b: mx.wrap(function)(operator, b).sum())(b)
    np.testing.assert_allclose(got, jax.grad(lambda b: function(array, b).sum())(b), rtol=1e-4)


def test_an_explicit_mesh():
    """Arrays that carry their sharding in their type."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0).reshape(4, 2), jax.NamedSharding(mesh, jax.P("i")))
        value = type(MATERIALIZABLE["product"])(x, x + 1)
        assert jax.typeof(mx.wrap(lambda w: w + 1)(value)).sharding.spec == jax.typeof(x).sharding.spec
        check(mx.wrap(lambda w, y: w * y)(value, x), dense(value) * x)


def test_double_precision():
    """A value's type follows from its leaves."""
    with jax.enable_x64():
        value = type(MATERIALIZABLE["product"])(jnp.arange(3.0), jnp.arange(3.0))
        assert value.dtype == jnp.float64
        check(mx.wrap(lambda w: lax.map(lambda r: r * 2, w))(value), jnp.arange(3.0) ** 2 * 2)
