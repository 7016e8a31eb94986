"""Rules: what authors register, and which of them serves a bind.

A rule is chosen by the types of all operands at once. plum knows which signature is the most specific; it is asked once for
each combination of types, and after that a dictionary decides.

    @mx.register(lax.mul_p)
    def mul_length_any(x: Length, y: ArrayLike) -> Length:
        return Length(x.metres * y)
"""

import abc
import inspect
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import plum
from plum._resolver import (
    Resolver,
)  # plum exports only its `Function`, which knows neither NotImplemented nor plain rules

from . import _jax
from ._array_value import register_type
from ._value import is_value_type
from .errors import AmbiguousRuleError, DuplicateRuleError, RegistrationError, RuleParameterError
from .primitives import is_neutral


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A registered function, with what has to be known of its signature on every call."""

    function: Callable[..., Any]
    parameters: frozenset[str] | None  # the primitive's parameters that it names; None if it takes all
    wants_primitive: bool
    plain: bool  # also applies where no operand is a value
    takes_all: bool  # can be called as it is, with all parameters

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__qualname__", repr(self.function))

    @property
    def location(self) -> str:
        """Name, file and line of the function."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"`{self.name}`" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")

    def __call__(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run the rule with the parameters that it names.

        Raises:
            RuleParameterError: If a parameter that it does not name is not neutral.
        """
        if self.parameters is None:
            kwargs = params
        else:
            kwargs = {}
            for name, x in params.items():
                if name in self.parameters:
                    kwargs[name] = x
                elif not is_neutral(name, x, operands):
                    raise RuleParameterError(
                        f"the rule {self.location} for `{primitive}` does not take the parameter {name!r}, and {name}={x!r} "
                        f"changes the result. Name it in the rule's signature (`*, {name}`), or take all with `**params`."
                    )
        if self.wants_primitive:
            return self.function(*operands, primitive=primitive, **kwargs)
        return self.function(*operands, **kwargs)


class JittedFunction(NamedTuple):
    """A whole function that rules were registered for: it arrives as the bind of a jit."""

    function: Callable[..., Any]

    multiple_results = True  # as the jit that it arrives as

    def __repr__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def __hash__(self) -> int:
        return id(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JittedFunction) and other.function is self.function


UNDECIDED: Any = object()  # what no rule was chosen for yet, or has to be chosen for each time


class Registry:
    """The rules, by primitive. The package uses one, `registry`; tests may make their own."""

    def __init__(self) -> None:
        self.version = 0  # part of the key of every kept program: a rule registered later is seen
        self.plain: set[Any] = set()  # primitives with a rule for plain operands
        self.functions: dict[str, JittedFunction] = {}  # by the source that a jit's debug information names
        self._rules: dict[Any, Resolver] = {}
        self.unconcerned: set[Any] = set()  # primitives that go to the parent as they are where no operand is a value
        self.chosen: dict[
            tuple[Any, ...], Rule | None
        ] = {}  # by primitive and the operands' types, and avals of tracers

    # -- registering

    def add(
        self,
        primitives: Sequence[Any],
        function: Callable[..., Any],
        *,
        precedence: int,
        override: bool,
        plain: bool | None,
        names: Any,
    ) -> None:
        """Register ``function`` for each of ``primitives``.

        ``names`` are the local names of the registering code. ``plain=None`` leaves it to the annotations whether the rule
        applies to arrays alone.
        """
        keys = [self._key(p) for p in primitives]
        signature, rule = _read_signature(function, precedence, plain, names)
        for key in keys:
            resolver = self._rules.get(key)
            if resolver is None:
                resolver = Resolver(str(key))
            same = [m for m in resolver.methods if m.signature == signature]
            if same and not override:
                raise DuplicateRuleError(
                    f"`{key}` has a rule for {_signature(signature)} already: {cast(Rule, same[0].implementation).location}. "
                    f"To replace it by {rule.location}, write `@register({key}_p, override=True)`."
                )
            for method in same:
                resolver.methods.remove(method)
            resolver.register(plum.Method(rule, signature, function_name=str(key), return_type=Any))
            # A thread that looks rules up now sees all of the new rule or nothing of it.
            self._rules = {**self._rules, key: resolver}
            if rule.plain:
                self.plain = self.plain | {key}
        self.unconcerned, self.chosen = set(), {}
        self.version += 1

    def _key(self, primitive: Any) -> Any:
        if isinstance(primitive, _jax.Primitive):
            if primitive in _jax.CUSTOM_CALLS:
                raise RegistrationError(
                    f"a rule for `{primitive}` would never run: the functions in it are opaque when it is bound. Register "
                    "rules for the primitives inside."
                )
            return primitive
        if not callable(primitive):
            raise RegistrationError(
                f"`register` takes primitives, and {primitive!r} is not one. Primitives end in `_p`: "
                "`@register(jax.lax.sin_p)`."
            )
        source = _jax.source_if_one_bind(primitive)
        if source is None:
            raise RegistrationError(
                f"`{getattr(primitive, '__name__', primitive)}` does not arrive as one bind: it is no jitted function, or is "
                "inlined, so a rule for it would not run. Register rules for the primitives that it consists of "
                "(`jax.make_jaxpr` shows them)."
            )
        return self.functions.setdefault(source, JittedFunction(primitive))

    # -- looking up

    def __contains__(self, primitive: Any) -> bool:
        return primitive in self._rules

    def find(self, primitive: Any, operands: Sequence[Any]) -> Rule | None:
        """Return the most specific rule for these operands, or None.

        Raises:
            AmbiguousRuleError: If several rules fit and none is more specific than the others.
        """
        chosen = self.chosen
        key = (primitive, *map(type, operands))
        if any(issubclass(t, _jax.Tracer) for t in key[1:]):
            key = (*key, *map(_aval_type, operands))
        rule = chosen.get(key, UNDECIDED)
        if rule is UNDECIDED:
            resolver = self._rules.get(primitive)
            methods = resolver.methods if resolver is not None else []
            rule = _resolve(primitive, methods, operands)
            by_function = primitive is _jax.jit_p and self.functions  # which are asked first, each time
            if not by_function and all(_decided_by_type(t) for m in methods for t in _types(m.signature)):
                chosen[key] = rule
        return rule

    def after(self, primitive: Any, operands: Sequence[Any], tried: Sequence[Rule]) -> Rule | None:
        """Return the next candidate after rules that returned `NotImplemented`."""
        methods = [m for m in self._rules[primitive].methods if m.implementation not in tried]
        return _resolve(primitive, methods, operands)

    def misfits(self, primitive: Any, classes: Sequence[type]) -> Iterator[tuple[Rule, str, tuple[int, ...] | None]]:
        """Yield each rule of a primitive with its signature, and the operands of these classes that it does not admit.

        None in their place if it takes another number of operands.
        """
        resolver = self._rules.get(primitive)
        for method in resolver.methods if resolver is not None else []:
            signature = method.signature
            wanted = list(signature.types)
            if signature.has_varargs:
                wanted += [signature.varargs] * (len(classes) - len(wanted))
            pairs = list(zip(wanted, classes, strict=False))
            misfits = tuple(i for i, (annotation, cls) in enumerate(pairs) if not _admits(annotation, cls))
            found = misfits if len(wanted) == len(classes) else None
            yield cast(Rule, method.implementation), _signature(signature), found

    def rules(self, primitive: Any) -> Iterator[tuple[Rule, str]]:
        """Yield each rule of a primitive with its signature as text."""
        if primitive in self._rules:
            for method in self._rules[primitive].methods:
                yield cast(Rule, method.implementation), _signature(method.signature)


def _admits(annotation: Any, cls: type) -> bool:
    """Whether an annotation admits instances of a class; one that depends on more than the class is taken to."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_admits(inner, cls) for inner in typing.get_args(annotation))
    if not isinstance(annotation, type) or annotation is jax.Array or not _decided_by_type(annotation):
        return annotation is not jax.Array or issubclass(cls, jax.Array)
    return issubclass(cls, annotation)


def _resolve(primitive: Any, methods: Sequence[Any], operands: Sequence[Any]) -> Rule | None:
    candidates = [m for m in methods if m.signature.match(tuple(operands))]
    if not any(is_value_type(type(x)) for x in operands):
        candidates = [m for m in candidates if m.implementation.plain]
    if len(candidates) <= 1:  # what plum would say, without asking it
        return candidates[0].implementation if candidates else None
    resolver = Resolver(str(primitive))
    for method in candidates:
        resolver.register(method)
    try:
        return cast(Rule, resolver.resolve(tuple(operands)).implementation)
    except plum.AmbiguousLookupError as error:
        rivals = [cast(Rule, m.implementation).location for m in error.methods]
        types_ = ", ".join(type(x).__name__ for x in operands)
        raise AmbiguousRuleError(
            f"`{primitive}` of ({types_}) fits several rules, and none is more specific: {' and '.join(rivals)}. Register a "
            f"rule for ({types_}), or give the one that should win `@register({primitive}_p, precedence=1)`."
        ) from None


def _aval_type(x: Any) -> Any:
    """The class of a tracer's aval, which decides whether the tracer is a `jax.Array`."""
    return type(x.aval) if isinstance(x, _jax.Tracer) else None


def _types(signature: Any) -> tuple[Any, ...]:
    return signature.types + ((signature.varargs,) if signature.has_varargs else ())


def _signature(signature: Any) -> str:
    names = [getattr(t, "__name__", None) or str(t) for t in signature.types]
    if signature.has_varargs:
        names.append("*" + (getattr(signature.varargs, "__name__", None) or str(signature.varargs)))
    return f"({', '.join(names)})"


def _decided_by_type(annotation: Any) -> bool:
    """Whether an operand's class (and a tracer's aval) decides if it fits: so for classes and unions of them.

    plum's own `is_faithful` says no to every class with a metaclass of its own, `jax.Array` among them.
    """
    if annotation is Any or annotation is object or annotation is jax.Array:
        return True
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return all(map(_decided_by_type, typing.get_args(annotation)))
    if not isinstance(annotation, type) or origin is not None:
        return False
    return type(annotation).__instancecheck__ in (type.__instancecheck__, abc.ABCMeta.__instancecheck__)


def _admits_value(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(_admits_value, typing.get_args(annotation)))
    return not (
        isinstance(annotation, type)
        and (annotation is type(None) or issubclass(annotation, (jax.Array, *_jax.ARRAY_TYPES)))
    )


def _named_types(annotation: Any) -> Iterator[type]:
    for inner in typing.get_args(annotation):
        yield from _named_types(inner)
    if isinstance(annotation, type):
        yield annotation


def _read_signature(function: Callable[..., Any], precedence: int, plain: bool | None, names: Any) -> tuple[Any, Rule]:
    """Turn a rule's annotations into a plum signature, and its keywords into the parameters that it takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"`register` decorates a function, and {function!r} has no signature.") from error
    positional: list[Any] = []
    varargs: Any = plum.Signature().varargs
    keywords: set[str] | None = set()
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append(_evaluate(function, p, names))
        elif p.kind is p.VAR_POSITIONAL:
            varargs = _evaluate(function, p, names)
        elif p.kind is p.VAR_KEYWORD:
            keywords = None
        elif keywords is not None:
            keywords.add(p.name)
    with warnings.catch_warnings():  # plum warns of types that depend on the value; those are resolved on every call
        warnings.filterwarnings("ignore", "Could not (resolve|determine)")
        signature = plum.Signature(*positional, varargs=varargs, precedence=precedence)
    annotations = _types(signature)
    if plain is None:
        plain = not any(map(_admits_value, annotations))
    if not plain and not any(map(_admits_value, annotations)):
        raise RegistrationError(
            f"the rule {getattr(function, '__qualname__', function)!r} names no array-ish type, so it would never run: rules "
            "apply where an operand is a value. Annotate one (`x: MyArray`), or write `@register(..., plain=True)` for a rule "
            "on plain arrays."
        )
    for cls in {t for a in annotations for t in _named_types(a)}:
        if is_value_type(cls):
            register_type(cls)
    named = inspect.signature(function).parameters
    wants_primitive = "primitive" in named and named["primitive"].kind is inspect.Parameter.KEYWORD_ONLY
    taken = None if keywords is None else frozenset(keywords - {"primitive"})
    return signature, Rule(function, taken, wants_primitive, plain, keywords is None and not wants_primitive)


def _evaluate(function: Callable[..., Any], parameter: inspect.Parameter, names: Any) -> Any:
    """Return a parameter's annotation; one that is a string may name what is local to the registering code."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}), names)
    except Exception as error:
        raise RegistrationError(
            f"the annotation {annotation!r} of {parameter.name!r} in the rule {getattr(function, '__qualname__', function)!r} "
            f"cannot be evaluated: {type(error).__name__}: {error}. Import or define that type before the rule."
        ) from error


registry = Registry()


def register(
    *primitives: Any, precedence: int = 0, override: bool = False, plain: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule: what to do when a primitive, or a jitted function, meets operands of certain types.

    The annotations of the positional parameters choose; among the rules that fit, the most specific one runs. It gets the
    operands raw, and runs inside the dispatch: operations in it dispatch again. Keyword parameters receive the
    primitive's parameters of these names, ``**params`` all of them, and ``primitive`` the primitive itself. A rule may return
    `NotImplemented`; then the next candidate is tried.

    Args:
        *primitives: One or more primitives (``jax.lax.add_p``), or jitted functions (``jax.numpy.linalg.solve``), which
            the rule then stands for as a whole, called with default options.
        precedence: Decides between rules of which none is more specific.
        override: Replace a rule with the same signature.
        plain: Also apply where no operand is a value.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        RegistrationError: If something cannot have a rule, or the rule names no array-ish type.
        DuplicateRuleError: If the signature has a rule already.
    """
    if not primitives:
        raise RegistrationError("`register` needs the primitive that the rule is for: `@register(jax.lax.sin_p)`.")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        frame = sys._getframe(1)
        registry.add(primitives, function, precedence=precedence, override=override, plain=plain, names=frame.f_locals)
        return function

    return decorate
