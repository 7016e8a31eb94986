"""Law 2 and law 4: rules serve what is inside a construct, and a re-bound primitive keeps its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import morphax as mx
from morphax import _jax

from ..values import Box, Exp, Ints, Metre, X


class Matrix(mx.ArrayValue):
    """Two leaves that stand for a product of matrices; only its product with an array has a rule."""

    left: jax.Array
    right: jax.Array

    def __jax_array__(self):
        raise TypeError("it is too large")

    def aval(self):
        return jax.core.ShapedArray((self.left.shape[-2], self.right.shape[-1]), self.left.dtype)

    linear = False


@mx.register(jax.lax.dot_general_p)
def dot_general_matrix_array(x: Matrix, y: jax.Array, *, dimension_numbers, **params):
    low = jax.lax.dot_general(x.right, y, dimension_numbers, **params)
    return jax.lax.dot_general(x.left, low, (((1,), (0,)), ((), ())), **params)


@mx.register(jax.lax.dot_general_p)
def dot_general_array_matrix(x: jax.Array, y: Matrix, *, dimension_numbers, **params):
    low = jax.lax.dot_general(x, y.left, dimension_numbers, **params)
    return jax.lax.dot_general(low, y.right, (((low.ndim - 1,), (0,)), ((), ())), **params)


M = Matrix(jnp.ones((4, 2)), jnp.arange(10.0).reshape(2, 5) / 30)
DENSE = M.left @ M.right
V = jnp.linspace(-1, 1, 5)
f = lambda w, x: jnp.tanh(w @ x)

CONSTRUCTS = {
    "eager": f,
    "jit": jax.jit(f),
    "checkpoint": jax.checkpoint(f),
    "vmap": lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x])),
    "grad": lambda w, x: jax.grad(lambda x: f(w, x).sum())(x),
    "jacfwd": lambda w, x: jax.jacfwd(lambda x: f(w, x))(x),
    "grad of checkpoint": lambda w, x: jax.grad(lambda x: jax.checkpoint(f)(w, x).sum())(x),
    "custom_jvp beside": lambda w, x: jax.nn.relu(w @ x),
    "custom_vjp closing over it": lambda w, x: _closing_over(w)(x),
}


def _closing_over(w):
    @jax.custom_vjp
    def product(x):
        return w @ x

    product.defvjp(lambda x: (w @ x, None), lambda _, g: (g @ jnp.ones((4, 5)),))
    return product


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_value_that_refuses_is_served_by_its_rule(name):
    """Nothing asks it for an array on the way."""
    function = CONSTRUCTS[name]
    np.testing.assert_allclose(mx.wrap(function)(M, V), function(DENSE, V), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(mx.wrap(function))(M, V), function(DENSE, V), rtol=1e-5)


def test_jit_traces_a_function_once():
    """The user's function is traced once for all calls, the wrapped program too."""
    traced = []

    @jax.jit
    def g(x):
        traced.append(1)
        return jnp.sin(x) * x

    for _ in range(4):
        assert type(mx.wrap(g)(Box(X))) is Box
    assert len(traced) == 1


def _eqns(fn, *args):
    return {e.primitive.name: e.params for e in jax.make_jaxpr(fn)(*args).eqns}


def test_jit_keeps_its_parameters():
    """Name, donation, kept arguments, inlining, compiler options, shardings."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def named(v, x):
        return v * x

    options = dict(donate_argnums=(0, 1), keep_unused=True)
    jitted = jax.jit(named, in_shardings=sharding, out_shardings=sharding, **options)
    for value in (Box(X), Ints(jnp.ones((3, 2), jnp.int8), jnp.float32(2))):
        kept = _eqns(mx.wrap(jitted), value, X)["jit"]
        want = _eqns(jitted, mx.materialize(value), X)["jit"]
        for name in ("name", "keep_unused", "inline", "ctx_mesh"):
            assert kept[name] == want[name]
        leaves = len(jax.tree.leaves(value))
        assert kept["donated_invars"] == (True,) * (leaves + 1)
        assert kept["in_shardings"][-1] == sharding
        assert len(kept["in_shardings"]) == len(kept["in_layouts"]) == leaves + 1
    assert _eqns(mx.wrap(jitted), Box(X), X)["jit"]["in_shardings"] == (sharding, sharding)


def test_jit_with_compiler_options():
    """They need a top-level call, as in JAX, and then reach the compiler."""
    options = {"xla_embed_ir_in_executable": True}
    assert type(mx.wrap(jax.jit(lambda v: v * 2.0, compiler_options=options))(Box(X))) is Box
    with pytest.raises(Exception, match="No such compile option"):
        mx.wrap(jax.jit(lambda v: v * 2.0, compiler_options={"no_such_option": True}))(Box(X))


def test_checkpoint_keeps_its_parameters():
    """The policy is the same object."""
    policy = jax.checkpoint_policies.dots_saveable
    kept = _eqns(mx.wrap(jax.checkpoint(lambda v: jnp.sin(v), policy=policy, prevent_cse=False)), Box(X))["remat2"]
    assert kept["policy"] is policy
    assert kept["prevent_cse"] is False


def test_custom_derivative_calls_stay():
    """The primitive is bound again, so that whoever differentiates outside uses the user's rule."""
    assert "custom_jvp_call" in _eqns(mx.wrap(jax.nn.relu), Exp(X))
    assert "custom_jvp_call" in _eqns(
        mx.wrap(lambda v: jax.nn.relu(v)), Ints(jnp.ones((3, 2), jnp.int8), jnp.float32(2))
    )


def test_name_scopes_reach_the_equations_of_rules():
    """For profiles."""

    def scoped(w, x):
        with jax.named_scope("my_scope"):
            return w @ x

    for function in (scoped, jax.jit(scoped)):
        text = jax.jit(mx.wrap(function)).lower(M, V).as_text(debug_info=True)
        assert "my_scope/dot_general" in text


def test_the_gradient_of_a_unit_is_a_unit():
    """`wrap` of `grad`: the cotangents are what the rules make of them."""
    out = mx.wrap(jax.grad(lambda x: x * x))(Metre(jnp.float32(2.0)))
    assert type(out) is Metre
    assert out.power == 1
    np.testing.assert_allclose(out.array, 4.0)


def test_a_linear_type_keeps_its_type_through_a_custom_derivative():
    """A value of one leaf comes out of a `custom_jvp` function as it does out of others."""

    @jax.custom_jvp
    def product(x, y):
        return x * y

    product.defjvp(lambda p, t: (product(*p), t[0] * p[1] * 10.0 + p[0] * t[1]))
    assert type(mx.wrap(product)(Box(X), X)) is Box
    assert type(jax.jit(mx.wrap(product))(Box(X), X)) is Box
    loss = lambda v, y: mx.materialize(mx.wrap(product)(v, y)).sum()
    np.testing.assert_allclose(jax.grad(loss)(Box(X), X).array, 10 * X)


def test_a_program_is_freed_with_its_function():
    """Kept programs are weak on the jaxpr: neither the function nor what it closed over stays."""
    import gc
    import weakref

    class Big:
        pass

    big = Big()
    alive = weakref.ref(big)

    def make(held):
        def g(v):
            assert held
            return v * 2.0

        return jax.jit(g)

    g = make(big)
    mx.wrap(g)(Box(X))
    del g, big
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_a_rule_that_closes_over_a_tracer_is_not_kept():
    """Two outer programs with different factors share one inner function."""

    class Local(Box):
        pass

    factor = []

    @mx.register(jax.lax.log1p_p)
    def log1p_local(x: Local, **params):
        return Local(x.array * factor[-1])

    inner = jax.jit(lambda v: jax.lax.log1p(v))

    def outer(s):
        factor.append(s)
        return mx.wrap(inner)(Local(X)).array

    for s in (2.0, 3.0):
        np.testing.assert_allclose(jax.jit(outer)(s), s * X)


def test_linearity_is_found_by_tracing():
    """`a + 1` can be transposed and is not linear; a cast and a scale are."""
    from morphax._differentiation import meaning
    from morphax._value import flatten

    class Shifted(mx.ArrayValue):
        a: jax.Array

        def __jax_array__(self):
            return self.a + 1

    class Halved(mx.ArrayValue):
        a: jax.Array

        def __jax_array__(self):
            return self.a / 2

    def facts(value):
        leaves, structure = flatten(value)
        return meaning(structure, [jax.typeof(x) for x in leaves])

    assert facts(Box(X)) == (False, True, True)
    assert facts(Halved(X)) == (False, True, False)
    assert facts(Shifted(X)) == (False, False, False)
    assert facts(Exp(X)) == (False, False, False)
    assert facts(Ints(jnp.ones(2, jnp.int8), jnp.float32(2))) == (False, True, False)
    assert facts(Metre(X)) == (True, True, True)
    assert facts(M) == (True, False, False)

    class Diagonal(mx.ArrayValue):
        entries: jax.Array

        def __jax_array__(self):
            return jnp.diag(self.entries)

    assert facts(Diagonal(jnp.ones(3))) == (False, True, False)


def test_integer_results_of_a_refusing_value():
    """A primitive that is an object is dispatched by what it expands to, where no derivative can be lost."""

    class Hidden(mx.ArrayValue):
        a: jax.Array

        def aval(self):
            return jax.typeof(self.a)

        def __jax_array__(self):
            raise TypeError("hidden")

    @mx.register(jax.lax.ne_p)
    def ne_hidden(x: Hidden, y: jax.typing.ArrayLike):
        return jax.lax.ne(x.a, y)

    np.testing.assert_array_equal(
        mx.wrap(lambda v: jnp.nonzero(v, size=2)[0])(Hidden(jnp.array([0.0, 1.0, 2.0]))), [1, 2]
    )


class Half(mx.ArrayValue):
    """Stands for half its leaf, refuses, and does not say that it is linear."""

    a: jax.Array

    def aval(self):
        return jax.typeof(self.a)

    def __jax_array__(self):
        raise TypeError("hidden")


class Third(Half):
    """As `Half`, and says so."""

    linear = True


@mx.register(jax.lax.mul_p)
def mul_half_any(x: Half, y: jax.typing.ArrayLike):
    return type(x)(x.a * y)


def test_a_refusing_value_comes_out_of_a_custom_derivative_function():
    """Linear or not; the one that has no tangent is differentiated through the body."""

    @jax.custom_jvp
    def doubled(x):
        return x * 2.0

    doubled.defjvp(lambda p, t: (doubled(*p), t[0] * 7.0))
    for cls, slope in ((Half, 2.0), (Third, 7.0)):
        got, tangent = jax.jvp(mx.wrap(doubled), (cls(X),), (cls(X),))
        assert type(got) is type(tangent) is cls
        np.testing.assert_array_equal(got.a, X * 2)
        np.testing.assert_array_equal(tangent.a, X * slope)


class Doubled(getattr(_jax.hijax, "HiPrim", None) or _jax.hijax.VJPHiPrimitive):
    """A primitive that is an object, with a rule that is marked by a factor of 7."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return x * 2.0

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0] * 7.0


def test_floating_results_of_a_refusing_value():
    """A primitive that is an object keeps its forward-mode rule; where the value has no tangent, an error says so."""
    doubled = mx.wrap(lambda v: Doubled(jax.typeof(X))(v))
    np.testing.assert_array_equal(doubled(Half(X)).a, X * 2)
    got, tangent = jax.jvp(doubled, (Third(X),), (Third(X),))
    np.testing.assert_array_equal(got.a, X * 2)
    np.testing.assert_array_equal(tangent.a, X * 7)
    with pytest.raises(mx.errors.DifferentiationError, match="set `linear = True` on the class"):
        jax.jvp(doubled, (Half(X),), (Half(X),))


def test_a_value_that_refuses_is_differentiated_through_the_body():
    """Where its tangent is no value of tangents, and its array cannot be asked: the custom rule gives way to the body."""

    class Root(mx.ArrayValue):
        square: jax.Array

        def aval(self):
            return jax.typeof(self.square)

        def __jax_array__(self):
            raise TypeError("refuses")

    @mx.register(jax.lax.tan_p)
    def tan_root(x: Root, **params):
        return x.square * 3

    @jax.custom_jvp
    def custom(x, y):
        return jax.lax.tan(x) + y

    custom.defjvp(lambda p, t: (custom(*p), 100.0 * t[1]))
    f = mx.wrap(lambda x, y: custom(x, y).sum())
    grads = jax.grad(lambda x: f(x, X))(Root(X)), jax.jit(jax.grad(lambda x: f(x, X)))(Root(X))
    for g in grads:
        np.testing.assert_allclose(g.square, 3 * jnp.ones_like(X))
    np.testing.assert_allclose(jax.grad(lambda y: f(Root(X), y))(X), 100 * jnp.ones_like(X))


def test_device_put_moves_leaves_and_makes_nothing_dense():
    """JAX asks where the array lies, and is not given one."""
    moved = mx.wrap(lambda m: jax.device_put(m, jax.devices()[0]))(M)
    assert type(moved) is Matrix
    asked = []

    class Counting(Box):
        def __jax_array__(self):
            asked.append(1)
            return self.array

    assert type(mx.wrap(lambda v: jax.device_put(v, jax.devices()[0]))(Counting(X))) is Counting
    assert not asked
