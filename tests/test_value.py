"""The contract: what a value is, and how it becomes an array."""

import copy
import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import morphax as mx
from morphax import errors

from .values import MATERIALIZABLE, Box, Full, Metre, Named, Pair, Plain, X, Zeros


@pytest.mark.parametrize("value", MATERIALIZABLE.values(), ids=MATERIALIZABLE)
def test_materialize_gives_the_array(value):
    """`materialize` is the author's `__jax_array__`, carried on until it is an array."""
    array = mx.materialize(value)
    assert isinstance(array, jax.Array)
    assert (array.shape, array.dtype) == (mx.aval_of(value).shape, mx.aval_of(value).dtype)


@pytest.mark.parametrize("value", MATERIALIZABLE.values(), ids=MATERIALIZABLE)
def test_a_value_without_dispatch_materializes_in_jax_numpy(value):
    """Outside `wrap` an operation on a value is the operation on its array."""
    np.testing.assert_array_equal(jnp.sin(value), jnp.sin(mx.materialize(value)))
    np.testing.assert_array_equal(jnp.add(X, value), X + mx.materialize(value))


@pytest.mark.parametrize(
    "value", [v for k, v in MATERIALIZABLE.items() if isinstance(v, mx.ArrayValue)], ids=lambda v: type(v).__name__
)
def test_a_value_without_dispatch_materializes_in_jax_lax(value):
    """`jax.lax` functions bind their arguments as they are, and take values all the same."""
    np.testing.assert_array_equal(lax.sin(value), jnp.sin(mx.materialize(value)))
    np.testing.assert_array_equal(lax.add(X, value), X + mx.materialize(value))


def test_a_registered_foreign_type_materializes_in_jax_lax():
    """`register_type` admits a class that knows nothing of this package."""

    @mx.register_type
    class Foreign:
        def __jax_array__(self):
            return X

    np.testing.assert_array_equal(lax.sin(Foreign()), jnp.sin(X))


def test_fields_are_keyword_or_positional():
    """An `ArrayValue` is a dataclass."""
    assert Full(fill=X[0, 0], size_=(2,)).size_ == (2,)
    assert dataclasses.replace(Full(X[0, 0], (2,)), size_=(3,)).shape == (3,)


def test_shape_dtype_and_the_rest_come_from_aval():
    """A value tells shape, dtype, ndim and size like an array."""
    v = Full(jnp.float16(1), (4, 5))
    assert (v.shape, v.dtype, v.ndim, v.size, len(v), v.nbytes) == ((4, 5), jnp.float16, 2, 20, 4, 2)


def test_weak_type_is_kept():
    """The type of a value is that of its array, weak type too."""
    assert mx.aval_of(Box(jnp.asarray(2.0))).weak_type
    assert mx.wrap(lambda v, y: v * y)(Box(jnp.asarray(2.0)), X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_values_are_immutable():
    """Setting or deleting a field is an error that shows the way."""
    v = Box(X)
    with pytest.raises(dataclasses.FrozenInstanceError) as error:
        v.array = X
    assert str(error.value) == (
        "cannot set 'array' of a `Box`: values are immutable. Use `dataclasses.replace(x, array=...)`."
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        del v.array


def test_a_hand_written_init_sets_each_field_once():
    """A type may compute its fields."""

    class Sum(mx.ArrayValue):
        total: Array

        def __init__(self, a, b):
            self.total = a + b

        def __jax_array__(self):
            return self.total

    v = Sum(X, X)
    np.testing.assert_array_equal(v.total, 2 * X)
    np.testing.assert_array_equal(jax.tree.map(lambda x: x + 1, v).total, 2 * X + 1)


def test_a_hand_written_init_is_inherited():
    """A subclass without an `__init__` of its own uses its parent's."""

    class Sum(mx.ArrayValue):
        total: Array

        def __init__(self, a, b):
            self.total = a + b

        def __jax_array__(self):
            return self.total

    class Sub(Sum):
        def aval(self):
            return jax.typeof(self.total)

    np.testing.assert_array_equal(Sub(X, X).total, 2 * X)


def test_a_field_that_init_forgot_is_named():
    """A missing field is refused when the instance is made."""

    class Half(mx.ArrayValue):
        a: Array
        b: Array

        def __init__(self, a):
            self.a = a

        def __jax_array__(self):
            return self.a

    with pytest.raises(errors.FieldError) as error:
        Half(X)
    assert str(error.value) == "`Half.__init__` did not set the field 'b': add `self.b = ...`."


def test_check_init_runs_once_and_not_on_unflattening():
    """`__check_init__` sees instances that the user makes, and not those that JAX rebuilds."""
    seen = []

    class Checked(mx.ArrayValue):
        a: Array

        def __check_init__(self):
            seen.append(self.a)

        def __jax_array__(self):
            return self.a

    v = Checked(X)
    jax.tree.map(lambda x: None, v)
    assert len(seen) == 1


@pytest.mark.parametrize("held", [X, np.ones(2), (1, X)], ids=["jax", "numpy", "nested"])
def test_an_array_in_a_static_field_is_refused(held):
    """The error names the field, at construction."""

    class Bad(mx.ArrayValue):
        a: Array
        scale: object = mx.field(static=True)

        def __jax_array__(self):
            return self.a

    with pytest.raises(errors.FieldError) as error:
        Bad(X, held)
    assert str(error.value) == (
        "the static field 'scale' of `Bad` holds an array. Static fields are compared and hashed whenever JAX looks up a "
        "compiled program, and arrays cannot be: declare it `scale: Array`, without `static=True`, or store a tuple of "
        "numbers."
    )


def test_an_unhashable_static_field_is_refused():
    """A list would break `jit` later."""
    with pytest.raises(errors.FieldError, match="'size_' of `Zeros` holds a `list`, which is not hashable"):
        Zeros([1, 2])


def test_equinox_static_fields_are_static():
    """Any field whose metadata says so is metadata."""

    class Tagged(mx.ArrayValue):
        a: Array
        tag: str = eqx.field(static=True, default="x")

        def __jax_array__(self):
            return self.a

    assert jax.tree.leaves(Tagged(X)) == [X] or len(jax.tree.leaves(Tagged(X))) == 1


def test_a_field_may_be_named_like_a_property():
    """`shape` as metadata is a natural field."""

    class Const(mx.ArrayValue):
        fill: Array
        shape: tuple = mx.field(static=True)

        def aval(self):
            return jax.core.ShapedArray(self.shape, self.fill.dtype)

        def __jax_array__(self):
            return jnp.full(self.shape, self.fill)

    v = Const(jnp.float32(1), (2, 3))
    assert v.shape == (2, 3)
    assert v.ndim == 2
    np.testing.assert_array_equal(mx.wrap(jnp.sin)(v), jnp.sin(jnp.ones((2, 3))))


def test_copies_and_pickles():
    """Values are ordinary objects."""
    v = Full(X[0, 0], (2, 3))
    for w in (copy.copy(v), copy.deepcopy(v), pickle.loads(pickle.dumps(v))):
        assert (w.fill, w.size_) == (v.fill, v.size_)


def test_repr_is_short():
    """Arrays show as dtype and shape."""
    assert repr(Full(X, (2,))) == "Full(fill=float32[3, 2], size_=(2,))"


def test_values_are_not_hashable_and_compare_elementwise():
    """As arrays."""
    with pytest.raises(TypeError):
        hash(Box(X))
    np.testing.assert_array_equal(Box(X) == Box(X), jnp.ones_like(X, bool))
    assert Box(X) != None  # noqa: E711
    assert Box(X) != "x"


def test_one_that_returns_itself_is_an_error():
    """It would never become an array."""

    class Loop(mx.ArrayValue):
        a: Array

        def aval(self):
            return jax.typeof(self.a)

        def __jax_array__(self):
            return self

    with pytest.raises(errors.MaterializationError, match=r"`Loop.__jax_array__` returned the value itself"):
        mx.materialize(Loop(X))


def test_none_from_jax_array_is_an_error():
    """A forgotten return is told."""

    class Forgot(mx.ArrayValue):
        a: Array

        def __jax_array__(self):
            self.a + 1

    with pytest.raises(errors.MaterializationError, match=r"`Forgot.__jax_array__` returned a `NoneType`"):
        mx.materialize(Forgot(X))


def test_super_reaches_the_authors_method():
    """`super().__jax_array__()` is the parent's meaning, and does not lift."""

    class Twice(Box):
        def __jax_array__(self):
            return 2 * super().__jax_array__()

    np.testing.assert_array_equal(mx.materialize(Twice(X)), 2 * X)
    np.testing.assert_array_equal(mx.wrap(jnp.cos)(Twice(X)), jnp.cos(2 * X))


def test_operators_dispatch_outside_wrap_and_give_values_back():
    """Either order, with arrays of JAX and of NumPy and with numbers."""
    v = Box(X)
    for out in (
        v * v,
        v * X,
        X * v,
        2.0 * v,
        np.ones((3, 2), np.float32) * v,
        v + v,
        -v,
        jax.jit(lambda v: v * 2.0)(v),
    ):
        assert type(out) is Box


def test_operators_refuse_what_no_array_takes():
    """None and strings raise Python's own error."""
    for other in (None, "x", [1.0]):
        with pytest.raises(TypeError, match="unsupported operand"):
            Box(X) + other


def test_array_methods_and_indexing():
    """A value has the methods of an array."""
    v, x = Pair(X, X), 2 * X
    for f in (
        lambda x: x.sum(0),
        lambda x: x.T,
        lambda x: x.mean(),
        lambda x: x.reshape(-1),
        lambda x: x.astype(jnp.float16),
        lambda x: x[1, ::2],
        lambda x: x.at[0].set(9.0),
        lambda x: x.at[0, 1].add(x[0, 0]),
        lambda x: x @ x.T,
        lambda x: jnp.stack(list(x)),
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: x > 3,
        lambda x: divmod(x, 2)[1],
        lambda x: abs(-x),
        lambda x: np.asarray(x),
    ):
        np.testing.assert_allclose(f(v), f(x), rtol=1e-6)
    assert float(v[0, 0]) == 2.0
    assert Pair(jnp.int32(1), jnp.int32(2)).__index__() == 3
    assert bool(Box(jnp.asarray(True)))
    assert len(v) == 3


def test_registering_what_stands_for_no_array_is_refused():
    """The error says what is missing."""
    for cls in (int, jax.Array, np.ndarray, object, 3):
        with pytest.raises(errors.RegistrationError, match="`register_type` takes a class whose instances stand for"):
            mx.register_type(cls)


def test_aval_that_is_no_type_is_refused():
    """An `aval` that returns an array is a common slip."""

    class Slip(mx.ArrayValue):
        a: Array

        def aval(self):
            return self.a

        def __jax_array__(self):
            return self.a

    with pytest.raises(errors.AvalError, match="which is not the type of an array"):
        mx.wrap(jnp.sin)(Slip(X))


def test_is_value():
    """Arrays, scalars, tracers and classes are none."""
    assert all(map(mx.is_value, (Box(X), Named(X), Plain(X))))
    assert not any(map(mx.is_value, (X, np.ones(2), 1.0, None, "x", Box, jax.ShapeDtypeStruct((2,), "float32"))))
    jax.jit(lambda x: [] if mx.is_value(x) else x)(X)


def test_a_refusing_value_can_be_traced():
    """Its type is `aval`; it fails only when its array is wanted."""
    jaxpr = jax.make_jaxpr(lambda a: lax.mul(Metre(a), 2.0))(X)
    assert [e.primitive.name for e in jaxpr.eqns] == ["value", "mul"]


def test_asarray_outside_is_dense():
    """No dispatch is around, so the array is dense."""
    assert isinstance(mx.asarray(Box(X)), jax.Array)
    assert mx.asarray(X) is X
