"""What a function would make dense, why no rule served it, and the rules to be written: `coverage`.

print(mx.coverage(model, weights, x))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._events import Event
from ._explain import record
from ._missing import reasons, stub
from ._trace import CONSTRUCTS


@dataclass(frozen=True)
class Gap:
    """Operations of one kind that no rule serves.

    Attributes:
        operation: The primitive.
        operands: Per operand its type and shape, of the first of them.
        reasons: Per rule of the primitive why it does not fit.
        lines: The user's lines.
        count: How often it is met.
        bytes: The bytes of the arrays that are made.
        stub: The rule to be written, as code; empty where no rule would help, since it is JAX's own construct that needs an
            array.
    """

    operation: str
    operands: tuple[str, ...]
    reasons: tuple[str, ...]
    lines: tuple[str, ...]
    count: int
    bytes: int
    stub: str

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        made = f", {self.bytes:,} bytes" if self.bytes else ""
        head = f"`{self.operation}` of ({', '.join(self.operands)}){times}{made}"
        parts = [head, *(f"  at {line}" for line in self.lines), *(f"  {reason}" for reason in self.reasons)]
        return "\n".join(parts) + ("\n\n" + _indented(self.stub) if self.stub else "")


@dataclass(frozen=True)
class Coverage:
    """What `coverage` found. Printed, it lists the gaps, each with the rule to be written."""

    gaps: tuple[Gap, ...]
    served: int  # operations that rules serve

    @property
    def ok(self) -> bool:
        """Whether nothing is made dense."""
        return not self.gaps

    @property
    def stubs(self) -> str:
        """The rules to be written, as code."""
        return "\n\n\n".join(dict.fromkeys(gap.stub for gap in self.gaps if gap.stub))

    def __str__(self) -> str:
        dense = sum(gap.count for gap in self.gaps)
        total = f"{self.served} by rules, {dense} materialized ({sum(gap.bytes for gap in self.gaps):,} bytes)"
        return "\n\n".join([*map(str, self.gaps), total])


def coverage(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coverage:
    """Say what a function would make dense, before anything runs.

    Args:
        fn: As for `explain`.
        *args: Its arguments; abstract arrays suffice.
        **kwargs: Its keyword arguments.

    Returns:
        The operations that no rule serves, with the reasons and with stubs for the missing rules.
    """
    events = record(fn, args, kwargs).events
    kinds: dict[tuple[Any, ...], list[Event]] = {}
    for event in events:
        if event.rule is None:
            kinds.setdefault((event.operation, *(x.type for x in event.operands)), []).append(event)
    served = sum(event.rule is not None for event in events)
    return Coverage(tuple(map(_gap, kinds.values())), served)


def _gap(events: list[Event]) -> Gap:
    first = events[0]
    params = sorted({name for event in events for name in event.params})
    return Gap(
        str(first.operation),
        tuple(map(str, first.operands)),
        tuple(reasons(first.operation, first.operands)),
        tuple(dict.fromkeys(event.line for event in events if event.line)),
        len(events),
        sum(x.nbytes for event in events for x in event.dense),
        "" if first.operation in CONSTRUCTS else stub(first.operation, first.operands, params),
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
