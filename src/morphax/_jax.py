"""All that Morphax takes from JAX's private parts, and every difference between JAX versions.

A trace is an extension point that JAX does not publish, so the names below come from ``jax._src``. Each stands here with
the reason it is needed; the rest of the package imports it from this file and never names a JAX version. Tested on
JAX 0.10.2 to 0.12.0.1.
"""
# A name that one of the two versions lacks is unknown to a checker that sees the other.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import inspect
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives as primitives
import numpy as np
from jax._src import (
    ad_util,
    api,
    api_util,
    compute_on,
    config,
    core,
    custom_batching,
    dtypes,
    hijax,
    literals,
    pjit,
    shard_map,
    source_info_util,
    util,
    xla_metadata,
)
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import lax as lax_internal
from jax._src.lax import linalg, parallel
from jax._src.numpy import array_methods
from jax._src.sharding_impls import UNSPECIFIED

try:
    from jax._src import flattree  # since 0.12: how `scan` groups its operands
except ImportError:
    flattree = None
try:
    from jax._src.lax import eval_jaxpr as eval_jaxpr_module  # until 0.10; then a part of core
except ImportError:
    eval_jaxpr_module = None

OLDEST = (0, 10, 2)
NEWEST_TESTED = (0, 12, 0, 1)


def version_tuple(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version string: ``"0.12.0.1.dev3"`` gives ``(0, 12, 0, 1)``."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_version(text: str) -> None:
    """Refuse a JAX older than the floor, and warn once about one newer than the newest tested.

    Raises:
        ImportError: If ``text`` is older than 0.10.2.
    """
    version = version_tuple(text)
    if version < OLDEST:
        raise ImportError(
            f"morphax needs jax>={'.'.join(map(str, OLDEST))}, but jax {text} is installed: older releases drive a Trace "
            "in another way. Run `pip install --upgrade jax jaxlib`."
        )
    if version > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"morphax was tested up to jax {newest}; jax {text} is newer and may drive a Trace in another way.",
            stacklevel=2,
        )


check_version(jax.__version__)
MERGED_JAXPRS = not hasattr(core, "ClosedJaxpr")  # since 0.12 one class holds a jaxpr with or without its constants

# The extension point itself.
Trace = core.Trace
Tracer = core.Tracer
TraceTag = core.TraceTag
ShapedArray = core.ShapedArray
Primitive = core.Primitive
trace_ctx = core.trace_ctx  # the current trace: read and set on every bind, where a context manager costs too much
current = core.trace_state_strong_ref  # where it is kept, and
current_key = core.trace_state  # a weak reference to it, which is part of the key of jitted calls: for the hottest path
eval_trace = core.eval_trace
take_current_trace = core.take_current_trace
set_current_trace = core.set_current_trace
typeof = core.typeof  # `jax.typeof` is the same function behind one more call
DebugInfo = core.DebugInfo
Literal = core.Literal
wrap_init = lu.wrap_init
weakref_lru_cache = util.weakref_lru_cache  # weak on the jaxpr, and keyed by what tracing depends on (mesh, x64, ...)
trace_context = config.trace_context  # the same key, for caches that are not weak

# Zeros of derivatives.
Zero = ad_util.Zero
SymbolicZero = ad_util.SymbolicZero
instantiate = ad_util.instantiate
is_undefined_primal = ad.is_undefined_primal

# Rules of the `value` primitive.
primitive_jvps = ad.primitive_jvps
primitive_transposes = ad.primitive_transposes
primitive_batchers = batching.primitive_batchers
register_lowering = mlir.register_lowering
lower_fun = mlir.lower_fun

# Primitives that are not exported.
jit_p = pjit.jit_p
add_jaxvals_p = ad_util.add_jaxvals_p
stop_gradient_p = getattr(ad_util, "stop_gradient_p", None)
copy_p = lax_internal.copy_p
optimization_barrier_p = lax_internal.optimization_barrier_p
pvary_p = core.pvary_p
xla_metadata_value_p = xla_metadata.xla_metadata_value_p
remat_p = primitives.remat_p
scan_p = primitives.scan_p
while_p = primitives.while_p
cond_p = primitives.cond_p
linear_solve_p = primitives.linear_solve_p
custom_vmap_p = custom_batching.custom_vmap_p
composite_p = lax_internal.composite_p
compute_on_p = compute_on.compute_on_p
xla_metadata_call_p = getattr(xla_metadata, "xla_metadata_call_p", None)  # since 0.12
eval_jaxpr_p = core.eval_jaxpr_p if MERGED_JAXPRS else eval_jaxpr_module.eval_jaxpr_p
sharding_constraint_p = pjit.sharding_constraint_p
call_hi_primitive_p = hijax.call_hi_primitive_p
device_put_p = primitives.device_put_p
stack_p = getattr(lax_internal, "stack_p", None)
custom_jvp_call_p = primitives.custom_jvp_call_p
custom_vjp_call_p = primitives.custom_vjp_call_p
shard_map_p = shard_map.shard_map_p


def unexported_primitive(name: str) -> Any:
    """Return a collective or a step of a decomposition by its name; None if this JAX does not have it."""
    return getattr(parallel, name, None) or getattr(linalg, name, None)


# The types of leaves that JAX takes for arrays. A typed literal is what `bind` makes of a Python scalar.
LITERALS = tuple(
    getattr(literals, name)
    for name in ("TypedNdArray", "TypedInt", "TypedFloat", "TypedComplex")
    if hasattr(literals, name)
)
ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, *LITERALS)


_ordinary: dict[Any, bool] = {}  # primitives live as long as their modules


def is_ordinary(primitive: Any) -> bool:
    """Whether a primitive's bind hands it to the trace as it is: it is never high, and has no way of its own."""
    known = _ordinary.get(primitive)
    if known is None:
        own = vars(primitive)
        known = type(primitive) is Primitive and "bind_with_trace" not in own and "is_high" not in own
        _ordinary[primitive] = known
    return known


def current_trace() -> Any:
    """Return the trace that receives the next bind (None inside a bind, on JAX 0.12)."""
    return trace_ctx.trace


def checking_leaks() -> bool:
    """Whether `jax.checking_leaks` is on."""
    return config.check_tracer_leaks.value


def why_leaked(trace: Any) -> str:
    """Say which tracers of a trace that has ended are alive and who holds them; empty if none is.

    JAX raises where this is told. A dispatch tracer is refused wherever it is used after its call, so that one which lies
    about (JAX's own caches keep what a `pmap` captured) does no harm.
    """
    tracers = core.maybe_find_leaked_tracers(trace)
    return str(core.leaked_tracer_error("trace", trace, tracers)) if tracers else ""


def register_array_type(cls: type, lift: Callable[[Any], Any], aval: Callable[[Any], Any]) -> None:
    """Let JAX take an instance of ``cls`` as an operand: ``lift`` makes an array of it, ``aval`` tells its type.

    ``bind`` canonicalizes its arguments, and binary operations inside `shard_map` ask for the type before they bind.
    """
    register = getattr(dtypes, "register_canonicalize_value_handler", None)
    if register is not None:
        register(cls, lift)
    else:
        dtypes.canonicalize_value_handlers[cls] = lift  # 0.10: a dictionary, later a C++ registry
    core.pytype_aval_mappings[cls] = aval


def register_tracer_type(cls: type) -> None:
    """Let `typeof` find the aval of a tracer at once. It is asked at each bind, and would go through the class's bases."""
    core.pytype_aval_mappings[cls] = operator.attrgetter("aval")


# The operators of `jax.Array` and of tracers ask `__jax_array__` of the other operand before they defer to its reflected
# operator. They are known by their code.
_BINARY_OPERATORS = frozenset(
    f.__code__ for name, f in vars(array_methods).items() if name.startswith("_operator_") and inspect.isfunction(f)
)


def asked_by_operator(depth: int = 2) -> bool:
    """Whether the caller's caller is a binary operator of `jax.Array`."""
    return sys._getframe(depth).f_code in _BINARY_OPERATORS


def asked_only_whether() -> bool:
    """Whether `to_concrete_value`, which calls this, was called for a yes or no, and not for the value."""
    caller = sys._getframe(2)
    return caller.f_code is core.to_concrete_value.__code__ and caller.f_back.f_code is core.is_concrete.__code__


def asked_for_sharding() -> bool:
    """Whether `to_concrete_value`, which calls this, was called by `device_put` to see where the array lies now."""
    return sys._getframe(2).f_code is api._infer_src_sharding.__code__


def trace_jaxpr(fun: Callable[..., Any], avals: Sequence[Any], debug_info: Any = None) -> Any:
    """Trace ``fun``, which takes and returns lists of arrays, to a closed jaxpr.

    Unlike `jax.make_jaxpr` it keeps avals as they are (weak types, shardings, manual axes), runs ``fun`` once, and takes
    no name from it.
    """
    if debug_info is None:
        debug_info = DebugInfo("morphax", "value", None, None)
    wrapped = wrap_init(fun, debug_info=debug_info.with_unknown_names())
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return jaxpr.with_consts(consts) if MERGED_JAXPRS else core.ClosedJaxpr(jaxpr, consts)


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """Return the jaxpr with its constants as leading inputs, and the constants."""
    return pe.convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def close_jaxpr(jaxpr: Any) -> Any:
    """Return an open jaxpr without constants as a closed one."""
    return pe.close_jaxpr(jaxpr)


def dce_jaxpr(closed: Any) -> tuple[Any, list[bool]]:
    """Remove dead code from a closed jaxpr without constants: the open jaxpr, and which inputs it uses."""
    jaxpr = pe.convert_constvars_jaxpr(closed.jaxpr)
    return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))


def inlined(closed: Any) -> Any:
    """Return a closed jaxpr without its jit calls, to be compared with another: transformations rename them."""

    def run(jaxpr: Any, args: Any):
        env = dict(zip((*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars), (*jaxpr.consts, *args), strict=True))

        def read(v: Any):
            return v.val if isinstance(v, core.Literal) else env[v]

        for eqn in jaxpr.jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            if eqn.primitive is jit_p:
                outs = run(eqn.params["jaxpr"], operands)
            else:
                outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        return [read(v) for v in jaxpr.jaxpr.outvars]

    return trace_jaxpr(lambda *args: run(closed, args), closed.in_avals)


eval_jaxpr = core.jaxpr_as_fun  # keeps the equations' contexts and name stacks


class Equation(NamedTuple):
    """An equation that can be bound as it is, in no context of its own."""

    primitive: Any
    operands: Sequence[Any]  # variables, or what a literal is bound as
    known: Sequence[bool]  # whether it is a literal
    params: dict[str, Any]
    results: Sequence[Any]


@weakref_lru_cache
def equations_in_order(closed: Any) -> list[Equation] | None:
    """Return the equations of a closed jaxpr, if binding them one after the other loses nothing.

    That is: no name stack, no context that differs from the current one, and only primitives that are bound as they are. What
    `eval_jaxpr` keeps for each equation takes 6 us, more than the equation.
    """
    now = core.current_jaxpr_eqn_context()  # what it says is part of the key of this cache
    equations = []
    for eqn in closed.jaxpr.eqns:
        ordinary = eqn.primitive is jit_p or is_ordinary(eqn.primitive)
        if not ordinary or eqn.source_info.name_stack.stack or eqn.ctx is not now or eqn.effects:
            return None
        known = [isinstance(v, core.Literal) for v in eqn.invars]
        operands = [dtypes.canonicalize_value(v.val) if k else v for v, k in zip(eqn.invars, known, strict=True)]
        equations.append(Equation(eqn.primitive, operands, known, eqn.params, eqn.outvars))
    return equations


def debug_info_of(closed: Any) -> Any:
    """The debug information of a closed or an open jaxpr."""
    return closed.jaxpr.debug_info if hasattr(closed, "jaxpr") else closed.debug_info


def primitives_in(jaxpr: Any) -> Iterator[Any]:
    """Yield the primitive of each equation of a jaxpr and of the jaxprs in their parameters."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn.primitive
        for inner in core.jaxprs_in_params(eqn.params):
            yield from primitives_in(inner)


def jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the (open) jaxprs in the parameters of a bind."""
    return core.jaxprs_in_params(params)


def is_inexact(aval: Any) -> bool:
    """Whether arrays of this type have tangents of their own dtype: floating or complex, and no key or integer."""
    return dtypes.issubdtype(aval.dtype, np.inexact)


def nbytes(aval: Any) -> int:
    """The bytes of an array of this type."""
    return aval.size * getattr(aval.dtype, "itemsize", 0)


def zeros(aval: Any) -> Any:
    """Return an array of zeros of type ``aval`` (also for ``float0``)."""
    return ad_util.zeros_like_aval(aval)


# Lines of user code. Frames inside the package are not the user's; its tests and examples lie outside it.
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)


def user_line() -> str:
    """Return file, line and function of the innermost frame that belongs to the user; empty if there is none.

    An equation of a program that was traced before knows where the user wrote it. One that JAX made itself (inside
    `jax.numpy.add`, in a backward pass) knows no such place; then it is where the user called.
    """
    told = source_info_util.summarize(source_info_util.current())
    if told:
        return re.sub(r":(\d+):\d+ \(", r":\1 (", told)  # without the column, which not every version tells
    frame = sys._getframe(1)
    while frame is not None and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def names_dimensions(destination: Any) -> bool:
    """Whether a device or sharding speaks of the dimensions of an array."""
    if isinstance(destination, jax.sharding.NamedSharding):
        return any(axis is not None for axis in destination.spec)
    return isinstance(destination, jax.sharding.Sharding) and not destination.is_fully_replicated


def jit_params(
    params: dict[str, Any],
    jaxpr: Any,
    num_consts: int,
    operands: Sequence[tuple[int, bool]],
    results: Sequence[tuple[int, bool]],
) -> dict[str, Any]:
    """Rewrite the parameters of a `jit` bind for a body over leaves.

    Args:
        params: The parameters of the bind.
        jaxpr: The closed body over leaves.
        num_consts: The number of leading inputs that are constants of the body.
        operands: Per operand the number of its leaves, and whether each leaf has the shape of the operand: shardings and
            layouts speak of that shape, and are left open for other leaves.
        results: The same per result.
    """

    def spread(entries: Sequence[Any], slots: Sequence[tuple[int, bool]], otherwise: Any) -> tuple[Any, ...]:
        return tuple(
            entry if keep else otherwise for entry, (n, keep) in zip(entries, slots, strict=True) for _ in range(n)
        )

    return dict(
        params,
        jaxpr=jaxpr,
        donated_invars=(False,) * num_consts
        + tuple(d for d, (n, _) in zip(params["donated_invars"], operands, strict=True) for _ in range(n)),
        in_shardings=(UNSPECIFIED,) * num_consts + spread(params["in_shardings"], operands, UNSPECIFIED),
        out_shardings=spread(params["out_shardings"], results, UNSPECIFIED),
        in_layouts=(None,) * num_consts + spread(params["in_layouts"], operands, None),
        out_layouts=spread(params["out_layouts"], results, None),
    )


def is_inlined(params: dict[str, Any]) -> bool:
    """Whether a `jit` bind leaves nothing of itself where it is staged: so for most functions of `jax.numpy`."""
    inline = params["inline"]
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"  # an enumeration since 0.12


def jit_callable(fun: Callable[..., Any], params: dict[str, Any], donated: Sequence[bool]) -> Callable[..., Any] | None:
    """Return a `jax.jit` of ``fun`` with the parameters of a bind; None where it could lose one of them.

    Shardings, layouts, compiler options and meshes keep their exact form only in the bind itself.

    Args:
        fun: A function of arrays.
        params: The parameters of the bind.
        donated: Per operand of ``fun`` whether it is donated.
    """
    plain = (
        all(s is UNSPECIFIED for s in (*params["in_shardings"], *params["out_shardings"]))
        and all(entry is None for entry in (*params["in_layouts"], *params["out_layouts"]))
        and not params["compiler_options_kvs"]
        and params["ctx_mesh"].empty
    )
    if not plain:
        return None
    fun.__name__ = fun.__qualname__ = params["name"]
    positions = tuple(i for i, d in enumerate(donated) if d)
    return jax.jit(fun, donate_argnums=positions, keep_unused=params["keep_unused"], inline=params["inline"])


def with_its_jvp(primitive: Any, params: dict[str, Any]) -> Callable[..., Any] | None:
    """Return what a hijax primitive expands to as a `custom_jvp` function with the primitive's own rule, if it has one."""
    prim = params["_prim"]
    base = next(cls for cls in reversed(type(prim).__mro__) if hasattr(cls, "jvp"))
    if type(prim).jvp is base.jvp:
        return None
    rule = ad.primitive_jvps[primitive]

    @jax.custom_jvp
    def expanded(*operands: Any):
        return tuple(primitive.to_lojax(*operands, **params))

    def jvp(primals: Any, tangents: Any):
        zeros_as_theirs = [Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
        outs, tangents_out = rule(primals, zeros_as_theirs, **params)
        return tuple(outs), tuple(instantiate(t) for t in tangents_out)

    expanded.defjvp(jvp, symbolic_zeros=True)
    return expanded


same_type = core.typematch  # shape, dtype and sharding; of weak types below


def unstacked_aval(aval: Any) -> Any:
    """The type of a slice along the leading axis."""
    return core.mapped_aval(aval.shape[0], 0, aval)


def stacked_aval(size: int, aval: Any) -> Any:
    """The type of arrays stacked along a new leading axis."""
    return core.unmapped_aval(size, 0, aval)


def scan_sizes(params: dict[str, Any], num_operands: int) -> tuple[int, int]:
    """Return the numbers of constants and of carried operands of a `scan` bind."""
    if "ft_in" in params:  # since 0.12
        consts, carry, _ = params["ft_in"].update(range(num_operands)).unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def scan_params(params: dict[str, Any], jaxpr: Any, consts: int, carry: int, xs: int, ys: int) -> dict[str, Any]:
    """Rewrite the parameters of a `scan` bind for a body with these numbers of inputs and outputs."""
    if "ft_in" not in params:
        return dict(params, jaxpr=jaxpr, num_consts=consts, num_carry=carry)
    nones = flattree.nones
    ft_in = flattree.pack((nones(consts), nones(carry), nones(xs)))
    return dict(params, jaxpr=jaxpr, ft_in=ft_in, ft_out=flattree.pack((nones(carry), nones(ys))))


def remat_params(params: dict[str, Any], jaxpr: Any, num_consts: int, counts: Sequence[int]) -> dict[str, Any]:
    """Rewrite the parameters of a `checkpoint` bind: ``prevent_cse`` may be given per operand."""
    prevent_cse = params["prevent_cse"]
    if isinstance(prevent_cse, tuple):
        prevent_cse = (False,) * num_consts + tuple(
            p for p, n in zip(prevent_cse, counts, strict=True) for _ in range(n)
        )
    return dict(params, jaxpr=jaxpr, prevent_cse=prevent_cse)


def call_cotangents(result: Any) -> tuple[Any, Any]:
    """Split what a `custom_vjp` backward function returned into cotangents and logs (logs since 0.12)."""
    return result if MERGED_JAXPRS else (result, None)


def join_cotangents(cotangents: Sequence[Any], logs: Any) -> Any:
    """The inverse of `call_cotangents`."""
    return (list(cotangents), logs) if MERGED_JAXPRS else list(cotangents)


def reset_stores(fun: Any) -> None:
    """Empty the result stores of a wrapped function that JAX cannot see inside another one, so that it can run again."""
    for store in fun.stores:
        if store:
            store.reset()


# Bound with functions, not jaxprs: nothing can be said of them when they are bound, and no rule could run.
CUSTOM_CALLS = (
    custom_jvp_call_p,
    custom_vjp_call_p,
    shard_map_p,
)


_EMPTY = jax.jit(lambda: None)
_JITTED = type(_EMPTY)


def is_jit_without_options(function: Any) -> bool:
    """Whether a function is what `jax.jit` gives with no options, so that a jit around it may take its place.

    Donation, static arguments, shardings and the like are lost in a nested jit.
    """
    if type(function) is not _JITTED:
        return False
    info, plain = function._jit_info, _EMPTY._jit_info
    ignored = ("fun_sourceinfo", "fun_signature", "inline")
    return all(getattr(info, name) == getattr(plain, name) for name in info._fields if name not in ignored)


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` is on."""
    return config.disable_jit.value


def source_if_one_bind(function: Callable[..., Any]) -> str | None:
    """Return what a jit's debug information calls ``function``; None unless each call of it is one jit bind."""
    info = getattr(function, "_jit_info", None)
    if info is None or type(function) is not _JITTED:  # `functools.wraps` copies the attribute to other functions
        return None
    inline = getattr(info, "inline", False)
    if inline is True or "EARLY" in getattr(inline, "name", "") or "LATE" in getattr(inline, "name", ""):
        return None
    return api_util.fun_sourceinfo(function)


def called_with_defaults(function: Callable[..., Any], jaxpr: Any, avals: Sequence[Any]) -> bool:
    """Whether a jit's closed ``jaxpr`` is the one that ``function`` gives on these avals with default arguments.

    Static arguments leave no other mark in a jit bind.
    """
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    try:
        (eqn,) = jax.make_jaxpr(function)(*structs).eqns
    except Exception:  # fewer or other operands than its signature takes by position
        return False
    return str(eqn.params.get("jaxpr")) == str(jaxpr)
