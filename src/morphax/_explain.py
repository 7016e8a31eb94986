"""What dispatched, and what was made dense: `explain`.

print(mx.explain(model)(weights, x))
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import equinox as eqx

from . import _jax
from ._value import OBSERVER, aval_of, is_value
from ._wrap import dispatch

MATERIALIZED = "materialized"


@dataclass(frozen=True)
class Row:
    """One kind of operation on values that a function makes.

    Attributes:
        operation: The primitive or function.
        operands: Per operand its type and shape.
        rule: The rule that served it, with file and line, or "materialized".
        result: Type and shape of the result; empty if materialized.
        line: The user's line.
        count: How often it was met.
    """

    operation: str
    operands: tuple[str, ...]
    rule: str
    result: str
    line: str
    count: int


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Printed, it is a table."""

    rows: tuple[Row, ...]

    @property
    def materialized(self) -> tuple[Row, ...]:
        """The rows of operations that made a value dense."""
        return tuple(row for row in self.rows if row.rule == MATERIALIZED)

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        head = ("count", "operation", "operands", "result", "rule")
        body = [(str(r.count), r.operation, ", ".join(r.operands), r.result, r.rule) for r in self.rows]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *body]
        ]
        rule = "  ".join("-" * w for w in widths)
        served = sum(r.count for r in self.rows) - sum(r.count for r in self.materialized)
        return "\n".join(
            [lines[0], rule, *lines[1:], f"{served} by rules, {sum(r.count for r in self.materialized)} materialized"]
        )


def describe(x: Any) -> str:
    """Name an operand: the type of a value, and shape and dtype."""
    aval = (aval_of(x) if is_value(x) else _jax.typeof(x)).str_short(short_dtypes=True)
    return f"{type(x).__name__}({aval})" if is_value(x) else aval


class _Recorder:
    def __init__(self) -> None:
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.calls = 0  # of wrapped functions

    def called(self) -> None:
        self.calls += 1

    def _add(self, operation: Any, operands: Sequence[Any], rule: str, results: Any) -> None:
        results = results if isinstance(results, (list, tuple)) and not is_value(results) else [results]
        told = ", ".join(
            type(x).__name__ if not is_value(x) and hasattr(x, "dtype") is False else describe(x) for x in results
        )
        self.seen[(str(operation), tuple(map(describe, operands)), rule, told, _jax.user_line())] += 1

    def ruled(self, operation: Any, operands: Sequence[Any], rule: Any, results: Any) -> None:
        self._add(operation, operands, rule.location.replace("`", ""), results)

    def densified(self, operation: Any, operands: Sequence[Any]) -> None:
        self._add(operation, operands, MATERIALIZED, [])


def _dispatches(fn: Callable, args: Any, kwargs: Any, recorder: _Recorder) -> bool:
    """Call ``fn`` as it is, and say whether it called a wrapped function."""
    try:
        eqx.filter_eval_shape(lambda a, k: fn(*a, **k), args, kwargs)
    except Exception:
        if recorder.calls:
            raise
        return False  # it is not for raw values: it may be the function to be wrapped
    return bool(recorder.calls)


def explain(fn: Callable) -> Callable[..., Explanation]:
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
        recorder = _Recorder()
        token = OBSERVER.set(recorder)
        try:
            if not _dispatches(fn, args, kwargs, recorder):
                recorder.seen.clear()
                eqx.filter_eval_shape(lambda a, k: dispatch(fn, a, k), args, kwargs)
        finally:
            OBSERVER.reset(token)
        return Explanation(tuple(Row(*cast(Any, key), count=count) for key, count in recorder.seen.items()))

    return explained
