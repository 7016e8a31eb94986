"""What a dispatch tells of itself, and whom: the one mechanism under `explain`, the materialization policy and checking.

An `Event` is an operation on values: the rule that served it, or the values that became arrays for it. Observers are told of
each, wherever the dispatch goes: programs over leaves that are kept for later calls keep their events too.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from . import _jax
from ._value import aval_of, is_value


class Operand(NamedTuple):
    """What an operand or result is: a value of a type (None for an array), and the type of the array."""

    type: Any
    aval: Any

    @classmethod
    def of(cls, x: Any) -> "Operand":
        """Describe a value or an array."""
        return cls(type(x), aval_of(x)) if is_value(x) else cls(None, _jax.typeof(x))

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return _jax.nbytes(self.aval)

    def __str__(self) -> str:
        shape = self.aval.str_short(short_dtypes=True)
        return shape if self.type is None else f"{self.type.__name__}({shape})"


class Event(NamedTuple):
    """An operation that values took part in.

    Attributes:
        operation: The primitive, or the whole function.
        operands: Its operands.
        params: The names of its parameters that have to be taken into account.
        rule: The rule that served it; None if its values became arrays, or if JAX's own construct was bound over leaves.
        results: Its results; empty without a rule.
        dense: The values that became arrays for it, and had not before.
        line: File, line and function of the user's code.
    """

    operation: Any
    operands: tuple[Operand, ...]
    params: tuple[str, ...]
    rule: Any
    results: tuple[Operand, ...]
    dense: tuple[Operand, ...]
    line: str


class Observer:
    """Is told of each event while it is among `OBSERVERS`.

    Attributes:
        sees_numbers: Whether it wants the operands and results themselves, as they come, and not only what they are.
    """

    sees_numbers = False

    def called(self) -> None:
        """A wrapped function is called."""

    def told(self, event: Event) -> None:
        """An operation was dispatched."""

    def ruled(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any], rule: Any, result: Any) -> None:
        """A rule gave this result. Only for those that see numbers."""


class _Observers:
    """Whoever observes now, in this thread or task."""

    def __init__(self, *always: Observer) -> None:
        self.observe_always(*always)

    def observe_always(self, *observers: Observer) -> None:
        """Let these observe from now on, in every thread, where no others do."""
        variable: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=observers)
        self.get, self.set, self.reset = variable.get, variable.set, variable.reset


OBSERVERS = _Observers()


@contextmanager
def observing(*observers: Observer, alone: bool = False) -> Generator[None]:
    """Let observers be told of what is dispatched in this block, in place of the others or beside them."""
    token = OBSERVERS.set(observers if alone else (*OBSERVERS.get(), *observers))
    try:
        yield
    finally:
        OBSERVERS.reset(token)


def tell(event: Event) -> None:
    """Tell an event to whoever observes now."""
    for observer in OBSERVERS.get():
        observer.told(event)


class Collector(Observer):
    """Keeps the events of a sub-program, which is told of only if it is the one that is used."""

    sees_numbers = True

    def __init__(self, around: Sequence[Observer]) -> None:
        self.events: list[Event] = []
        self._seeing = [observer for observer in around if observer.sees_numbers]

    def told(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def ruled(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any], rule: Any, result: Any) -> None:
        """Hand it on: numbers cannot be kept."""
        for observer in self._seeing:
            observer.ruled(primitive, operands, params, rule, result)
