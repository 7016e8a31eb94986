"""What is to happen where a value becomes an array: nothing, a warning, or an error.

with mx.materialization("error"):
train_step(weights, batch)

model = mx.wrap(model, materialize="warn")
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ._events import Event, Observer, observing
from ._missing import reasons, stub
from ._trace import CONSTRUCTS
from .errors import MaterializationError, MaterializationWarning, PolicyError

Mode = Literal["allow", "warn", "error"]


@dataclass(frozen=True)
class Policy(Observer):
    """What happens where a value becomes an array that no rule's author or user asked for.

    Attributes:
        mode: "allow", "warn" (once for each of the user's lines) or "error".
        max_bytes: Arrays up to this size are always allowed.
    """

    mode: Mode
    max_bytes: int = 0
    _warned: set[tuple[str, str]] = field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in ("allow", "warn", "error"):
            raise PolicyError(f'a materialization policy is "allow", "warn" or "error", and not {self.mode!r}.')

    def told(self, event: Event) -> None:
        """Refuse or warn, if the operation made a value dense."""
        large = [x for x in event.dense if x.nbytes > self.max_bytes]
        if not large or self.mode == "allow":
            return
        text = _explanation(event, sum(x.nbytes for x in large))
        if self.mode == "error":
            error = MaterializationError(text)
            error.located = True
            raise error
        site = str(event.operation), event.line
        if site not in self._warned:
            self._warned.add(site)
            warnings.warn(text, MaterializationWarning, stacklevel=2)


def _explanation(event: Event, size: int) -> str:
    operands = ", ".join(map(str, event.operands))
    lines = [
        f"`{event.operation}` of ({operands}) has no rule and makes a dense array of {size:,} bytes.",
        f"At {event.line}.",
        *reasons(event.operation, event.operands),
    ]
    if event.operation not in CONSTRUCTS:
        code = stub(event.operation, event.operands, event.params)
        lines += ["Write the rule:", *(f"    {line}" for line in code.splitlines())]
    return "\n".join(lines)


@contextmanager
def materialization(mode: Mode, *, max_bytes: int = 0) -> Generator[None]:
    """Say what happens in this block where a value becomes an array for want of a rule.

    A program that `jax.jit` has compiled before is not traced again, so that nothing is told of it.

    Args:
        mode: "allow", "warn" (a `MaterializationWarning`, once for each of the user's lines) or "error" (a
            `MaterializationError`).
        max_bytes: Arrays up to this size are always allowed.
    """
    with observing(Policy(mode, max_bytes)):
        yield
