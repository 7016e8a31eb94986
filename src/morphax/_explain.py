"""What dispatched, and what was made dense: `explain`.

print(mx.explain(model)(weights, x))
"""

import html
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import equinox as eqx

from ._events import Event, Observer, observing
from ._wrap import dispatch

MATERIALIZED = "materialized"
_HEAD = ("count", "operation", "operands", "result", "bytes", "rule", "line")


@dataclass(frozen=True)
class Row:
    """One kind of operation on values that a function makes.

    Attributes:
        operation: The primitive or function.
        operands: Per operand its type and shape.
        rule: The rule that served it, with file and line, or "materialized".
        result: Type and shape of the result; empty if materialized.
        bytes: The bytes of the arrays that values became for it, all occurrences together. An array that is there already
            counts nothing.
        line: The user's line.
        count: How often it was met.
    """

    operation: str
    operands: tuple[str, ...]
    rule: str
    result: str
    bytes: int
    line: str
    count: int

    def _cells(self) -> tuple[str, ...]:
        made = f"{self.bytes:,}" if self.bytes else ""
        line = os.path.basename(self.line)  # the file's name; the whole path would make the table wide
        return str(self.count), self.operation, ", ".join(self.operands), self.result, made, self.rule, line


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Printed, it is a table; rich and notebooks show it as theirs."""

    rows: tuple[Row, ...]

    @property
    def materialized(self) -> tuple[Row, ...]:
        """The rows of operations that made a value dense."""
        return tuple(row for row in self.rows if row.rule == MATERIALIZED)

    @property
    def totals(self) -> str:
        """A line that counts."""
        dense = sum(row.count for row in self.materialized)
        made = sum(row.bytes for row in self.rows)
        line = f"{sum(row.count for row in self.rows) - dense} by rules, {dense} materialized"
        return f"{line} ({made:,} bytes)" if dense else line

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries."""
        return [asdict(row) for row in self.rows]

    def show(self) -> None:
        """Print it by rich: with colours and in the width of the terminal, and plainly where there is none."""
        from rich.console import Console

        Console().print(self)

    def __str__(self) -> str:
        body = [row._cells() for row in self.rows]
        widths = [max(map(len, column)) for column in zip(_HEAD, *body, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(x, widths, strict=True)).rstrip() for x in [_HEAD, *body]]
        return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:], self.totals])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.totals}>"

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_HEAD, caption=self.totals)
        for row in self.rows:
            table.add_row(*row._cells(), style="yellow" if row.rule == MATERIALIZED else None)
        return table

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        rows = "".join(line("td", row._cells()) for row in self.rows)
        return f"<table><caption>{html.escape(self.totals)}</caption>{line('th', _HEAD)}{rows}</table>"


class Recorder(Observer):
    """Keeps what it is told, and whether a wrapped function was called."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls = 0

    def called(self) -> None:
        """Count it."""
        self.calls += 1

    def told(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def rows(self) -> tuple[Row, ...]:
        """The events, alike ones together."""
        counts: Counter[tuple[Any, ...]] = Counter()
        sizes: Counter[tuple[Any, ...]] = Counter()
        for event in self.events:
            rule = MATERIALIZED if event.rule is None else event.rule.location.replace("`", "")
            results = ", ".join(map(str, event.results))
            key = str(event.operation), tuple(map(str, event.operands)), rule, results, event.line
            counts[key] += 1
            sizes[key] += sum(x.nbytes for x in event.dense)
        return tuple(
            Row(o, xs, rule, y, sizes[o, xs, rule, y, at], at, n) for (o, xs, rule, y, at), n in counts.items()
        )


def record(fn: Callable[..., Any], args: Any, kwargs: Any) -> Recorder:
    """Trace a function abstractly, and record what is dispatched.

    Every call of a wrapped function in it is followed. Where there is none, it is taken for the function to be wrapped.
    """
    recorder = Recorder()
    with observing(recorder, alone=True):
        if not _dispatches(fn, args, kwargs, recorder):
            recorder.events.clear()
            eqx.filter_eval_shape(lambda a, k: dispatch(fn, a, k), args, kwargs)
    return recorder


def _dispatches(fn: Callable[..., Any], args: Any, kwargs: Any, recorder: Recorder) -> bool:
    """Call ``fn`` as it is, and say whether it called a wrapped function."""
    try:
        eqx.filter_eval_shape(lambda a, k: fn(*a, **k), args, kwargs)
    except Exception:
        if recorder.calls:
            raise
        return False  # it is not for raw values: it may be the function to be wrapped
    return bool(recorder.calls)


def explain(fn: Callable[..., Any]) -> Callable[..., Explanation]:
    """Return a function that says what ``fn`` would dispatch, and what would be made dense.

    Nothing is computed: ``fn`` is traced abstractly, as by `jax.eval_shape`, and every call of a wrapped function in it is
    followed. Where there is none, ``fn`` is taken for the function to be wrapped. What a `jax.jit` of a wrapped function has compiled
    before is not traced again, and not seen.

    Args:
        fn: A function that dispatches (`wrap` of a model, or the gradient of a loss that calls one), or one that could.

    Returns:
        A function of the same arguments that returns an `Explanation`.
    """

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        return Explanation(record(fn, args, kwargs).rows())

    return explained
