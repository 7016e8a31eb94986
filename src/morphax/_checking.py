"""Rules that are checked as they run: `checking`.

with mx.checking():
model(weights, x)            # a rule that returns another shape or dtype than its primitive is an error
"""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from . import _jax
from ._events import OBSERVERS, Observer, observing
from ._registry import JittedFunction
from ._value import aval_of, is_value, materialize
from .errors import MaterializationError, RuleResultError


class Checker(Observer):
    """Compares each rule's results with what the primitive gives on arrays of the operands' types."""

    sees_numbers = True

    def __init__(self, numbers: bool) -> None:
        self.numbers = numbers

    def ruled(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any], rule: Any, result: Any) -> None:
        """Check one rule's result."""
        if isinstance(primitive, JittedFunction):
            results, bind = jax.tree.leaves(result, is_leaf=is_value), primitive.function
        else:
            results = result if primitive.multiple_results else [result]

            def bind(*arrays: Any):
                return primitive.bind(*arrays, **params)

        expected = _expected(bind, [aval_of(x) if is_value(x) else _jax.typeof(x) for x in operands])
        for i, (x, aval) in enumerate(zip(results, expected, strict=True)):
            got = aval_of(x) if is_value(x) else _jax.typeof(x)
            if not _is_same(got, aval):
                raise RuleResultError(
                    f"the rule {rule.location} for `{primitive}` gave {_told(got)} as result {i}, and on arrays the primitive "
                    f"gives {_told(aval)}. Whatever code comes after it relies on that."
                )
        if self.numbers:
            _compare(primitive, operands, rule, results, bind)


def _expected(bind: Any, avals: Sequence[Any]) -> Sequence[Any]:
    return _jax.trace_jaxpr(lambda *arrays: jax.tree.leaves(bind(*arrays)), avals).out_avals


def _is_same(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def _told(aval: Any) -> str:
    return aval.str_short(short_dtypes=True) + (" (weakly typed)" if aval.weak_type else "")


def _compare(primitive: Any, operands: Sequence[Any], rule: Any, results: Sequence[Any], bind: Any) -> None:
    """Compare numbers with those of the materialized way; where numbers are not known, or refused, nothing is compared."""
    try:
        arrays = [materialize(x) for x in operands]
        dense = [materialize(x) for x in results]
    except MaterializationError:
        return
    if any(isinstance(x, _jax.Tracer) for x in (*arrays, *dense)):
        return
    for i, (got, want) in enumerate(zip(dense, jax.tree.leaves(bind(*arrays)), strict=True)):
        if not _is_close(np.asarray(got), np.asarray(want)):
            raise RuleResultError(
                f"the rule {rule.location} for `{primitive}` gave other numbers than the arrays as result {i}:\n{got}\n"
                f"in place of\n{want}"
            )


def _is_close(got: Any, want: Any) -> bool:
    if not np.issubdtype(want.dtype, np.inexact):
        return bool(np.array_equal(got, want))
    digits = np.finfo(want.dtype).eps ** 0.5
    size = np.max(np.abs(want), initial=0, where=np.isfinite(want))
    return bool(np.allclose(got, want, rtol=digits, atol=digits * size, equal_nan=True))


@contextmanager
def checking(*, numbers: bool = False) -> Generator[None]:
    """Check each rule's results in this block: shape, dtype and weak type must be the primitive's own.

    The environment variable ``MORPHAX_CHECK=1`` does so for the whole process. Programs are traced anew, so this is for tests.

    Args:
        numbers: Also compare the numbers with those of the materialized way, wherever they are known.

    Raises:
        RuleResultError: If a rule's result differs.
    """
    with observing(Checker(numbers)):
        yield


if os.environ.get("MORPHAX_CHECK", "") not in ("", "0"):
    OBSERVERS.observe_always(Checker(numbers=False))
