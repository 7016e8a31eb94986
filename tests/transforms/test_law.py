"""One law, for every construct and kind of value: the dense result is the result on the dense value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import morphax as mx

from ..values import MATERIALIZABLE, X, dense

Y = X[::-1] / 9  # small, so that no tanh is flat


@jax.custom_jvp
def scaled(w, y):
    """Its rule is marked by a factor of 7."""
    return w * y


scaled.defjvp(lambda p, t: (scaled(*p), 7.0 * (t[0] * p[1] + p[0] * t[1])))


@jax.custom_jvp
def with_zeros(w, y):
    """Its rule sees symbolic zeros."""
    return w * y


def _with_zeros_jvp(primals, tangents):
    w, y = primals
    terms = [t * o for t, o in zip(tangents, (y, w), strict=True) if type(t).__name__ != "SymbolicZero"]
    return w * y, 3.0 * sum(terms, jnp.zeros_like(Y))


with_zeros.defjvp(_with_zeros_jvp, symbolic_zeros=True)


@jax.custom_vjp
def reversed_scaled(w, y):
    """Its backward function is marked by factors of 3 and 5; both operands are residuals."""
    return w * y


reversed_scaled.defvjp(lambda w, y: (w * y, (w, y, w + y)), lambda r, g: (3.0 * g * r[1], 5.0 * g * r[0] + 0 * r[2]))


@jax.custom_vjp
def returning(w, y):
    """Returns its operands."""
    return w, y


returning.defvjp(lambda w, y: ((w, y), None), lambda _, g: (2.0 * g[0], 3.0 * g[1]))


def f(w, y):
    """Uses the value twice, once as a whole."""
    return jnp.tanh(w * y) + w.sum()


SQUARE = jnp.eye(2) * 3 + 0.1


@jax.custom_batching.custom_vmap
def batched(w, y):
    """Its batching rule is marked by a factor of 11."""
    return w * y


@batched.def_vmap
def _batched_rule(size, moved, w, y):
    w = w if moved[0] else w[None]
    return 11.0 * (w * y), True


def mesh():
    return jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


def sharded(fun, in_specs, out_specs, **kw):
    return jax.shard_map(fun, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, **kw)


def in_ref(w, y):
    """Stores into a reference what was computed with the value."""
    ref = jax.new_ref(jnp.zeros_like(y))
    ref[...] = w * y
    return ref[...] + 1


def root(w, y):
    """The root of a linear function of the unknown."""
    return lax.custom_root(lambda z: 2 * z - w * y, 0 * y, lambda f, z: z - f(z) / 2, lambda g, z: z / 2)


def called_back(w, y):
    """Calls NumPy."""
    return jax.pure_callback(lambda a, b: np.asarray(a) * np.asarray(b), jax.ShapeDtypeStruct(y.shape, y.dtype), w, y)


LOOPS = {
    "scan, constant": lambda w, y: lax.scan(lambda c, x: (c + 1.0, w * x), 0.0, jnp.stack([y, y + 1])),
    "scan, constant twice": lambda w, y: lax.scan(lambda c, x: (jnp.tanh(w * c) + w, x), y, y),
    "scan, unchanged carry": lambda w, y: lax.scan(lambda w, x: (w, w * x), w, jnp.stack([y, y])),
    "scan, changed carry": lambda w, y: lax.scan(lambda w, x: (w * 0.5, w + x), w, jnp.stack([y, y])),
    "scan, xs": lambda w, y: lax.scan(lambda c, r: (c + r.sum(), r * c), 0.0, w),
    "scan, xs reverse": lambda w, y: lax.scan(lambda c, r: (c * 0.5 + r, r * c), y[0], w, reverse=True),
    "scan, ys": lambda w, y: lax.scan(lambda c, x: (c, w), 0.0, y),
    "scan, ys computed": lambda w, y: lax.scan(lambda c, x: (c, w * 2.0), 0.0, y),
    "scan, xs to ys": lambda w, y: lax.scan(lambda c, r: (c, r), 0.0, w),
    "scan, unroll": lambda w, y: lax.scan(lambda c, x: (c * 0.5 + w, c), y, y, unroll=2),
    "scan, unrolled": lambda w, y: lax.scan(lambda c, x: (c * 0.5 + w, c), y, y, unroll=True),
    "scan, length 0": lambda w, y: lax.scan(lambda c, x: (c * w, x * w), y, jnp.zeros((0, 3, 2))),
    "scan, tree of carries": lambda w, y: lax.scan(
        lambda c, _: ((c[0], c[0] * c[1], c[2] + 1), None), (w, y, 0), None, 3
    ),
    "scan in scan": lambda w, y: lax.scan(lambda c, x: lax.scan(lambda d, _: (d * 0.5 + w, d), c, None, 2), y, y),
    "scan in jit": jax.jit(lambda w, y: lax.scan(lambda c, x: (c * 0.5 + w, c), y, y)),
    "fori_loop": lambda w, y: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(w * c), y),
    "fori_loop, carried": lambda w, y: lax.fori_loop(0, 3, lambda i, c: (c[0], c[0] * c[1]), (w, y)),
    "map": lambda w, y: lax.map(lambda x: w * x, y),
    "map over the value": lambda w, y: lax.map(lambda r: r * 2, w),
    "map, batches": lambda w, y: lax.map(lambda x: w * x, y, batch_size=2),
    "associative_scan": lambda w, y: lax.associative_scan(jnp.add, w),
    "associative_scan beside": lambda w, y: lax.associative_scan(lambda a, b: a + b, y) * w,
    "cond": lambda w, y: lax.cond(y[0, 0] > 0, lambda w, y: w * y, lambda w, y: y, w, y),
    "cond, returning the value": lambda w, y: lax.cond(y[0, 0] > 0, lambda w: w, lambda w: w, w),
    "cond, value or array": lambda w, y: lax.cond(y[0, 0] > 0, lambda w, y: w, lambda w, y: y, w, y),
    "cond, array or value": lambda w, y: lax.cond(y[0, 0] > 0, lambda w, y: y, lambda w, y: w, w, y),
    "cond, captured": lambda w, y: lax.cond(y[0, 0] > 0, lambda y: w * y, lambda y: y, y),
    "switch": lambda w, y: lax.switch(jnp.int32(1), [lambda w, y: y, lambda w, y: w * y, lambda w, y: w + y], w, y),
    "platform_dependent": lambda w, y: lax.platform_dependent(w, y, cpu=lambda w, y: w * y, default=lambda w, y: y),
    "vmap of cond": lambda w, y: jax.vmap(lambda x: lax.cond(x[0] > 0, lambda x: w * x, lambda x: w + x, x))(y),
    "vmap of scan": lambda w, y: jax.vmap(lambda x: lax.scan(lambda c, r: (c + r * x, c), x, w))(y),
    "checkpoint of scan": jax.checkpoint(lambda w, y: lax.scan(lambda c, x: (c * 0.5 + w, c), y, y)),
    "scan of checkpoint": lambda w, y: lax.scan(jax.checkpoint(lambda c, x: (jnp.tanh(w * c), c)), y, y),
    "scan of custom_vjp": lambda w, y: lax.scan(lambda c, x: (c, reversed_scaled(w, y)), 0.0, y),
    "scan of custom_jvp": lambda w, y: lax.scan(lambda c, x: (jax.nn.gelu(scaled(w, c)), c), y, y),
}
WHILE = {
    "while_loop": lambda w, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(w * c[1])), (0, y)),
    "while_loop, in the condition": lambda w, y: lax.while_loop(
        lambda c: (w * c).sum() + c.sum() < 50, lambda c: c + 1.5, y
    ),
    "while_loop, carried": lambda w, y: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], c[1] * c[2]), (0, w, y)
    ),
    "while_loop, carry changes": lambda w, y: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, w)
    ),
    "while_loop, array becomes value": lambda w, y: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, w * 1.0), (0, y)
    ),
    "while_loop, value is the condition": lambda w, y: lax.while_loop(lambda w: w.sum() > 1, lambda w: w - 1.0, w),
    "fori_loop, dynamic": lambda w, y: jax.jit(lambda n, y: lax.fori_loop(0, n, lambda i, c: jnp.tanh(w * c), y))(3, y),
}
OTHERS = {
    "solve": lambda w, y: jnp.linalg.solve(SQUARE + (w.T @ w), y.T),
    "solve of the value": lambda w, y: jnp.linalg.solve(w[:2] + 9 * SQUARE, y[0]),
    "cg": lambda w, y: jax.scipy.sparse.linalg.cg(lambda v: SQUARE @ v + v * (w * w).sum(), y[0])[0],
    "gmres": lambda w, y: jax.scipy.sparse.linalg.gmres(lambda v: SQUARE @ v + w.T @ (w @ v), y[0])[0],
    "custom_linear_solve": lambda w, y: lax.custom_linear_solve(
        lambda v: v * (1 + w * w), y, lambda mv, b: b / mv(jnp.ones_like(b)), symmetric=True
    ),
    "custom_vmap": batched,
    "vmap of custom_vmap": lambda w, y: jax.vmap(batched, (None, 0))(w, jnp.stack([y, y])),
    "vmap of custom_vmap over the value": lambda w, y: jax.vmap(batched)(w, y),
    "sequential_vmap": lambda w, y: jax.vmap(jax.custom_batching.sequential_vmap(lambda w, x: w * x), (None, 0))(
        w, jnp.stack([y, y])
    ),
    "custom_root": root,
    "custom_gradient": lambda w, y: jax.grad(
        lambda y: jax.custom_gradient(lambda y: (w * y, lambda g: 3.0 * g))(y).sum()
    )(y),
    "closure_convert": lambda w, y: (lambda f, c: f(y, *c))(*jax.closure_convert(lambda y: w * y, y)),
    "linear_call": lambda w, y: jax.custom_derivatives.linear_call(lambda r, v: r * v, lambda r, v: r * v, w, y),
    "composite": lambda w, y: lax.composite(lambda w, y: w * y, "my.op")(w, y),
    "traced call": lambda w, y: jax.jit(f).trace(w, y)(w, y),
    "make_jaxpr, evaluated": lambda w, y: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(w, y))(w, y)[0],
    "shard_map, replicated": lambda w, y: sharded(lambda w, x: w * x, (P(), P("i")), P("i"))(
        w, jnp.concatenate([y, y])[:2, None]
    ),
    "shard_map, captured": lambda w, y: sharded(lambda x: w * x, P("i"), P("i"))(jnp.concatenate([y, y])[:2, None]),
    "shard_map, cut": lambda w, y: sharded(lambda w: w * 2, P(None, "i"), P(None, "i"))(w),
    "shard_map, psum": lambda w, y: sharded(lambda w, x: lax.psum(w * x, "i"), (P(), P("i")), P())(
        w, jnp.stack([y, y])
    ),
    "jit of shard_map": lambda w, y: jax.jit(sharded(lambda w, x: w * x, (P(), P("i")), P("i")))(w, jnp.stack([y, y])),
    "pmap": lambda w, y: jax.pmap(lambda w, x: w * x, in_axes=(None, 0))(w, jnp.stack([y, y])),
    "vmap with psum": lambda w, y: jax.vmap(lambda x: lax.psum(w * x, "b"), axis_name="b")(y),
    "pure_callback": called_back,
    "reference": in_ref,
    "with_sharding_constraint": lambda w, y: lax.with_sharding_constraint(w, jax.NamedSharding(mesh(), P())) * y,
    "reductions and sorting": lambda w, y: (
        w.max(0),
        jnp.sort(w, 0),
        jnp.argmax(w),
        jnp.cumsum(w, 1),
        jnp.linalg.norm(w),
    ),
    "indexed updates": lambda w, y: (
        w.at[0].set(1.0),
        y.at[0].add(w[0]),
        w[jnp.array([1, 0])],
        lax.dynamic_slice(w, (1, 0), (1, 2)),
    ),
    "select and compare": lambda w, y: (jnp.where(w > y, w, y), w == w, jnp.clip(w, 0, 1), jnp.isfinite(w)),
    "decompositions": lambda w, y: (
        jnp.linalg.svd(w, compute_uv=False),
        jnp.linalg.qr(w)[1] ** 2,
        jax.scipy.linalg.expm(w.T @ w / 9),
    ),
    "pad, tile, concatenate": lambda w, y: (
        jnp.pad(w, 1),
        jnp.tile(w, (2, 1)),
        jnp.concatenate([w, y]),
        jnp.repeat(w, 2, 0),
    ),
    "random": lambda w, y: w + jax.random.normal(jax.random.key(0), w.shape),
}

FUNCTIONS = {
    **LOOPS,
    **WHILE,
    **OTHERS,
    "eager": f,
    "jit": jax.jit(f),
    "jit in jit": jax.jit(lambda w, y: jax.jit(f)(w, y) * 2),
    "jit returning the value": jax.jit(lambda w, y: (w, w + y)),
    "jit, static argument": lambda w, y: jax.jit(lambda w, n, y: w * n + y, static_argnums=1)(w, 3, y),
    "jit, inline": jax.jit(f, inline=True),
    "jit, unused operand kept": jax.jit(lambda w, y: y + 1, keep_unused=True),
    "checkpoint": jax.checkpoint(f),
    "checkpoint, policy": jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable),
    "checkpoint returning the value": jax.checkpoint(lambda w, y: (w, w + y)),
    "custom_jvp": scaled,
    "custom_jvp in jit": jax.jit(scaled),
    "custom_jvp, symbolic zeros": with_zeros,
    "custom_vjp": reversed_scaled,
    "custom_vjp in jit": jax.jit(reversed_scaled),
    "custom_vjp returning operands": returning,
    "relu": lambda w, y: jax.nn.relu(w - y),
    "gelu": lambda w, y: jax.nn.gelu(w - y),
    "silu": lambda w, y: jax.nn.silu(w - y),
    "logsumexp": lambda w, y: jax.nn.logsumexp(w - y),
    "logaddexp": lambda w, y: jnp.logaddexp(w, y),
    "relu alone": lambda w, y: jax.nn.relu(w) + y,
    "vmap": jax.vmap(f),
    "vmap, value unbatched": lambda w, y: jax.vmap(f, (None, 0))(w, jnp.stack([y, y + 1])),
    "vmap, other axes": lambda w, y: jax.vmap(lambda w, y: w * y, (1, -1), 1)(w, y),
    "vmap of vmap": lambda w, y: jax.vmap(jax.vmap(jnp.multiply), (1, 1))(w, y),
    "vmap of custom_jvp": lambda w, y: jax.vmap(scaled, (None, 0))(w, jnp.stack([y, y + 1])),
    "vmap of custom_vjp": lambda w, y: jax.vmap(reversed_scaled, (None, 0))(w, jnp.stack([y, y + 1])),
    "grad inside": lambda w, y: jax.grad(lambda w, y: f(w, y).sum(), argnums=(0, 1))(w, y),
    "grad of jit inside": lambda w, y: jax.grad(lambda w, y: jax.jit(f)(w, y).sum())(w, y),
    "grad of checkpoint inside": lambda w, y: jax.grad(lambda w, y: jax.checkpoint(f)(w, y).sum(), (0, 1))(w, y),
    "grad of custom_jvp inside": lambda w, y: jax.grad(lambda w, y: scaled(w, y).sum(), (0, 1))(w, y),
    "grad of custom_vjp inside": lambda w, y: jax.grad(lambda w, y: reversed_scaled(w, y).sum(), (0, 1))(w, y),
    "jvp inside": lambda w, y: jax.jvp(f, (w, y), (w, y)),
    "linearize inside": lambda w, y: jax.linearize(lambda y: f(w, y), y)[1](y),
    "linear_transpose inside": lambda w, y: jax.linear_transpose(lambda y: w * y, y)(y),
    "jacfwd inside": lambda w, y: jax.jacfwd(f, 1)(w, y),
    "jacrev inside": lambda w, y: jax.jacrev(f)(w, y),
    "hessian inside": lambda w, y: jax.hessian(lambda y: f(w, y).sum())(y),
    "stop_gradient": lambda w, y: jax.grad(lambda w: (lax.stop_gradient(w) * w).sum())(w),
    "copy": lambda w, y: jnp.array(w) * y,
    "optimization_barrier": lambda w, y: lax.optimization_barrier((w, y)),
    "device_put": lambda w, y: jax.device_put(w, jax.devices()[0]) * y,
    "convert to own dtype": lambda w, y: w.astype(w.dtype),
    "square, powers": lambda w, y: (jnp.square(w), w**2, w**3, w**5),
    "split and stack": lambda w, y: (jnp.split(w, 2, axis=1), jnp.stack([w, y])),
    "eval_shape": lambda w, y: jnp.zeros(jax.eval_shape(f, w, y).shape) + w,
}


def check(got, want):
    """The same structure, shapes, dtypes and numbers."""
    got, want = dense(got), dense(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


# The larger constructs meet the values that differ in what they ask of a construct; the others meet all.
LARGE = {**LOOPS, **WHILE, **OTHERS}
TELLING = ("product", "integer leaf", "no leaf", "nested", "no pytree")
INSIDE = [(name, kind) for name in FUNCTIONS for kind in MATERIALIZABLE if name not in LARGE or kind in TELLING]


@pytest.mark.parametrize(("name", "kind"), INSIDE)
def test_inside(name, kind):
    """The construct is inside `wrap`."""
    function, value = FUNCTIONS[name], MATERIALIZABLE[kind]
    check(mx.wrap(function)(value, Y), function(mx.materialize(value), Y))


IN_JIT = (
    "eager",
    "jit",
    "jit returning the value",
    "checkpoint",
    "custom_jvp",
    "custom_vjp",
    "relu",
    "vmap",
    "grad inside",
)
PYTREES = {k: v for k, v in MATERIALIZABLE.items() if k != "no pytree"}


@pytest.mark.parametrize("value", PYTREES.values(), ids=PYTREES)
@pytest.mark.parametrize("name", IN_JIT)
def test_jit_outside(name, value):
    """`jit` of the wrapped function."""
    check(jax.jit(mx.wrap(FUNCTIONS[name]))(value, Y), FUNCTIONS[name](mx.materialize(value), Y))


DIFFERENTIABLE = {k: v for k, v in PYTREES.items() if k != "no leaf"}
DERIVED = (
    "eager", "jit", "jit in jit", "checkpoint", "checkpoint, policy", "custom_jvp", "custom_jvp in jit", "custom_jvp, symbolic zeros",
    "custom_vjp", "custom_vjp in jit", "relu", "gelu", "silu", "logsumexp", "logaddexp", "relu alone", "vmap",
    "vmap of custom_jvp", "vmap of custom_vjp", "custom_vjp returning operands", *LOOPS, "solve", "cg", "gmres", "custom_linear_solve",
    "custom_root", "shard_map, replicated", "jit of shard_map", "pmap", "reference",
)  # fmt: skip


def total(function):
    """A number that every result takes part in."""
    return lambda w, y: sum((i + 1) * x.sum() for i, x in enumerate(jax.tree.leaves(dense(function(w, y)))))


DERIVATIVES = [(n, k) for n in DERIVED for k in DIFFERENTIABLE if n not in LARGE or k in ("product", "integer leaf")]


@pytest.mark.parametrize(("name", "kind"), DERIVATIVES)
def test_grad_outside(name, kind):
    """The gradient with respect to the leaves is that through `materialize`."""
    value = MATERIALIZABLE[kind]
    loss = total(FUNCTIONS[name])
    got = jax.grad(lambda w, y: total(mx.wrap(FUNCTIONS[name]))(w, y), (0, 1), allow_int=True)(value, Y)
    check_trees(got, jax.grad(lambda w, y: loss(mx.materialize(w), y), (0, 1), allow_int=True)(value, Y))


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, k in DERIVATIVES if "custom_vjp" not in n and n != "pmap"])
def test_jvp_outside(name, kind):
    """Forward mode, along the leaves."""
    value = MATERIALIZABLE[kind]

    def tangent(x):
        return jnp.ones_like(x) / 2 if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)

    direction = jax.tree.map(tangent, (value, Y))
    got = jax.jvp(total(mx.wrap(FUNCTIONS[name])), (value, Y), direction)
    check_trees(got, jax.jvp(lambda w, y: total(FUNCTIONS[name])(mx.materialize(w), y), (value, Y), direction))


@pytest.mark.parametrize("value", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize("name", ["eager", "jit", "checkpoint", "custom_jvp", "relu", "gelu"])
def test_hessian_outside(name, value):
    """Second derivatives, forward over reverse, along the plain operand."""
    loss = total(FUNCTIONS[name])
    got = jax.hessian(lambda y: total(mx.wrap(FUNCTIONS[name]))(value, y))(Y)
    check_trees(got, jax.hessian(lambda y: loss(mx.materialize(value), y))(Y))


STACKING = {
    k: v for k, v in PYTREES.items() if k in ("one leaf", "nonlinear", "product", "several leaves", "NamedTuple")
}


@pytest.mark.parametrize("value", STACKING.values(), ids=STACKING)
@pytest.mark.parametrize("name", ["eager", "jit", "checkpoint", "custom_jvp", "custom_vjp", "relu"])
def test_vmap_outside(name, value):
    """Leaves with a batch axis: each slice is a value."""
    stacked = jax.tree.map(lambda x: jnp.stack([x, x / 2]), value)
    got = dense(jax.vmap(mx.wrap(FUNCTIONS[name]), (0, None))(stacked, Y))
    check(got, jax.vmap(FUNCTIONS[name], (0, None))(jax.vmap(mx.materialize)(stacked), Y))


def check_trees(got, want):
    """As `check`, without materializing: gradients of values are values of gradients."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
