"""`wrap`: the transformation that makes a function dispatch, and the ways in and out of it."""

import functools
import types
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.tree_util as jtu

from . import _jax
from ._differentiation import meaning
from ._events import OBSERVERS, observing
from ._operators import dispatch_with
from ._policy import Mode, Policy
from ._registry import registry
from ._trace import DispatchTrace, UnusedTrace
from ._tracer import DispatchTracer
from ._value import flatten, is_value, is_value_type, lift, materialize

P = ParamSpec("P")
T = TypeVar("T")


class Wrapped(eqx.Module, Generic[P, T]):
    """A function that dispatches on array-ish values: what `wrap` returns.

    A pytree of the arrays of the function (of a model, say), so that `equinox.filter_jit` and `jax.vmap` take it.
    """

    fn: Callable[P, T]
    policy = None

    @property
    def __wrapped__(self) -> Callable[P, T]:
        return self.fn

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function; values anywhere in it and in the arguments dispatch."""
        for observer in OBSERVERS.get():
            observer.called()
        return dispatch(self.fn, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else jtu.Partial(self, instance)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Wrapped) or self.policy != other.policy:
            return False
        return self.fn is other.fn or _same_method(self.fn, other.fn)

    def __hash__(self) -> int:
        return hash((Wrapped, id(getattr(self.fn, "__func__", self.fn))))


class _Guarded(Wrapped[P, T]):
    """A wrapped function with a materialization policy of its own."""

    policy: Policy = eqx.field(static=True)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function; values anywhere in it and in the arguments dispatch."""
        with observing(self.policy):
            return super().__call__(*args, **kwargs)

    __eq__, __hash__ = Wrapped.__eq__, Wrapped.__hash__


class NotArrays(Exception):
    """A result holds something that a jit cannot return."""


class _WrappedJit(Wrapped[P, T]):
    """A wrapped `jax.jit` function: called from the top level, it is a `jax.jit` of the dispatching call.

    Its calls then go through JAX's C++ path, which costs a tenth of entering the dispatch and binding a jit there.
    """

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function; values anywhere in it and in the arguments dispatch."""
        if (
            _jax.current_trace() is _jax.eval_trace
            and not OBSERVERS.get()
            and not _jax.jit_is_disabled()
            and all(_is_array_type(type(x)) for x in jtu.tree_leaves((args, kwargs)))
        ):
            program = _program(self.fn)
            if program is not None:
                try:
                    return program(*args, **kwargs)
                except NotArrays:
                    pass
        return super().__call__(*args, **kwargs)


@functools.cache
def _is_array_type(cls: type) -> bool:
    return issubclass(cls, _jax.ARRAY_TYPES) and not issubclass(cls, _jax.Tracer)


def _program(fn: Any) -> Callable[..., Any] | None:
    """The program of a jitted function on values. None where a rule is for the jit itself: it is to see the arrays."""
    version, program = getattr(fn, "_morphax_program", (None, None))
    if version == registry.version:
        return program
    if _jax.jit_p in registry or _jax.source_if_one_bind(fn) in registry.functions:
        program = None
    else:
        program = jax.jit(functools.wraps(fn)(functools.partial(_call_for_arrays, fn)))
    fn._morphax_program = registry.version, program
    return program


def _call_for_arrays(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return arrays_only(dispatch(fn, args, kwargs))


def arrays_only(tree: Any) -> Any:
    """Return a pytree as it is, if a jit can return it.

    Raises:
        NotArrays: If not all of its leaves are arrays.
    """
    if not all(isinstance(x, (_jax.Tracer, *_jax.ARRAY_TYPES)) for x in jtu.tree_leaves(tree)):
        raise NotArrays
    return tree


def _same_method(a: Any, b: Any) -> bool:
    return isinstance(a, types.MethodType) and isinstance(b, types.MethodType) and a == b


@overload
def wrap(fn: Callable[P, T], *, materialize: Mode = ..., max_bytes: int = ...) -> Wrapped[P, T]: ...
@overload
def wrap(*, materialize: Mode = ..., max_bytes: int = ...) -> Callable[[Callable[P, T]], Wrapped[P, T]]: ...
def wrap(fn: Any = None, *, materialize: Mode = "allow", max_bytes: int = 0) -> Any:
    """Make a function dispatch on array-ish values.

    Inside, every value in the arguments (and in ``fn`` itself, if that is a pytree) is an array whose operations go to the
    rules registered for its type; where there is none, it becomes an array. Results that are values come back as values.
    Composes with `jax.jit`, `jax.vmap`, `jax.grad` and the rest, inside and outside. May be used as a decorator, of methods
    too.

    Args:
        fn: Any callable, written for arrays. Without it, `wrap` with options is a decorator.
        materialize: What happens where a value becomes an array for want of a rule, while the function is traced: as for
            `materialization`.
        max_bytes: Arrays up to this size may always be made.

    Returns:
        A callable with the name, documentation and signature of ``fn``; the same one for the same function, so that a
        `jax.jit` of it reuses its compiled programs.

    Raises:
        TypeError: If ``fn`` is not callable.
        ValueError: If ``materialize`` is no policy.
    """
    policy = None if materialize == "allow" else Policy(materialize, max_bytes)
    if fn is None:
        return functools.partial(wrap, materialize=materialize, max_bytes=max_bytes)
    if not callable(fn):
        raise TypeError(
            f"`wrap` takes a function, and got a `{type(fn).__name__}`. To call a function on values, write "
            "`wrap(f)(value, x)`; to make one value an array, `asarray(value)`."
        )
    if isinstance(fn, Wrapped):
        return fn if policy is None else wrap(fn.fn, materialize=materialize, max_bytes=max_bytes)
    if isinstance(fn, (eqx.Module, types.MethodType)):  # a method would keep its instance alive in the function
        return _wrapped(fn, policy)
    try:
        known = fn.__dict__.setdefault(_KEPT, {})
    except AttributeError:  # it takes no attributes; then each call makes a new one
        return _wrapped(fn, policy)
    kept = known.get(policy)
    if kept is None or kept.fn is not fn:  # (`functools.wraps` copies attributes to other functions)
        if kept is not None:
            known = fn.__dict__[_KEPT] = {}
        kept = known[policy] = _wrapped(fn, policy)
    return kept


_KEPT = "_morphax_wrapped"


def _wrapped(fn: Any, policy: Policy | None) -> Any:
    if policy is not None:
        return eqx.module_update_wrapper(_Guarded(fn, policy))
    return eqx.module_update_wrapper(_WrappedJit(fn) if _jax.is_jit_without_options(fn) else Wrapped(fn))


def dispatch(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    """Call ``fn`` under a dispatching trace, made with these options."""
    with _jax.take_current_trace() as parent:
        trace = UnusedTrace(parent, **options)
        set_trace = _jax.trace_ctx.set_trace
        try:
            set_trace(parent)
            fn, args, kwargs = _boxed_function(trace, fn), _box(trace, args), kwargs and _box(trace, kwargs)
            set_trace(trace)
            out = fn(*args, **kwargs)
            set_trace(parent)
            out = trace.unbox_tree(out)
        finally:
            trace.invalidate()
        if _jax.checking_leaks():
            del fn, args, kwargs  # they hold tracers
            leaked = _jax.why_leaked(trace)
            del trace
            if leaked:
                warnings.warn(f"a tracer outlives the wrapped call that made it: {leaked}", stacklevel=3)
    return out


def _box(trace: DispatchTrace, tree: Any) -> Any:
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=is_value)
    if not any(is_value_type(type(x)) for x in leaves):
        return tree
    return jtu.tree_unflatten(treedef, map(trace.box, leaves))


def _boxed_function(trace: DispatchTrace, fn: Any) -> Any:
    if isinstance(fn, types.FunctionType):
        return fn
    if isinstance(fn, types.MethodType):
        return types.MethodType(fn.__func__, _box(trace, fn.__self__))
    if isinstance(fn, functools.partial):
        return functools.partial(fn.func, *_box(trace, fn.args), **_box(trace, fn.keywords))
    return _box(trace, fn)


def unwrap(tree: Any) -> Any:
    """Return the value that a tracer holds, anywhere in a pytree; anything else stays.

    For what leaves a wrapped function in another way than by `return`, and for results made under `dispatching`.
    """
    return jtu.tree_map(lambda x: x.value if type(x) is DispatchTracer else x, tree)


def asarray(x: Any) -> Any:
    """Make an array of a raw value.

    To an operation a value is an array already. To a transformation (`jax.vmap`, the arguments of `jax.lax.scan`) it is the
    container of its leaves, unless it came in through `wrap` or this function.

    Args:
        x: A value, or an array.

    Returns:
        Inside a dispatching call an array that dispatches, elsewhere the dense array.
    """
    return lift(x) if is_value(x) else x


@contextmanager
def dispatching() -> Generator[None]:
    """Make operations in this block dispatch on values, with no wrapper: ``jnp.sin(value)``.

    Results that are values are tracers, which die with the block: take them out with `unwrap`. Calls of jitted functions
    inside take JAX's slower path in Python.
    """
    with _jax.take_current_trace() as parent:
        trace = DispatchTrace(parent)
        try:
            with _jax.set_current_trace(trace):
                yield
        finally:
            trace.invalidate()
            del trace


def install() -> None:
    """Make every operation of this thread dispatch on values, until `uninstall`: `dispatching` without a block."""
    if not isinstance(_jax.current_trace(), DispatchTrace):
        _jax.trace_ctx.set_trace(DispatchTrace(_jax.current_trace()))


def uninstall() -> None:
    """Undo `install`. Values that were computed meanwhile have to be taken out with `unwrap` before."""
    trace = _jax.current_trace()
    if isinstance(trace, DispatchTrace):
        _jax.trace_ctx.set_trace(trace.parent_trace)
        trace.invalidate()


def _staged(value: Any) -> Any:
    """Make an array of a value in a program that may be traced inside a wrapped function, which is to see it."""
    leaves, structure = flatten(value)
    refuses = structure is not None and meaning(structure, [_jax.typeof(x) for x in leaves]).refuses
    return materialize(value) if refuses else lift(value)


def _operate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operator or method of a value: in the current dispatch, or in one of its own, which gives the value back."""
    trace = _jax.current_trace()
    if not isinstance(trace, DispatchTrace):
        return dispatch(function, args, kwargs, densify=materialize if trace is _jax.eval_trace else _staged)
    args, kwargs = jtu.tree_map(asarray, (args, kwargs), is_leaf=is_value)
    return function(*args, **kwargs)


dispatch_with(_operate)
