"""Where no rule serves an operation: why each of its rules does not, and the one to be written."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ._events import Operand
from ._registry import registry


def reasons(operation: Any, operands: Sequence[Operand]) -> Iterator[str]:
    """Say of the rules that admit at least one of the values why they do not serve, those that fit best first."""
    values = {i for i, x in enumerate(operands) if x.type is not None}
    told = []
    for rule, signature, misfits in registry.misfits(operation, [x.type or jax.Array for x in operands]):
        if misfits is None or values <= set(misfits):
            continue
        wrong = ", ".join(f"operand {i} is {_kind(operands[i])}" for i in misfits)
        told.append(
            (len(misfits), f"Not {rule.location} for {signature}: {wrong or 'it gave way (`NotImplemented`)'}.")
        )
    yield from (text for _, text in sorted(told, key=lambda x: x[0])[:_NEAREST])


_NEAREST = 5  # how many rules are told of


def _kind(x: Operand) -> str:
    return "an array" if x.type is None else f"a `{x.type.__name__}`"


def stub(operation: Any, operands: Sequence[Operand], params: Sequence[str]) -> str:
    """Return the code of a rule for an operation, with the parameters that it has to take into account."""
    types = ["ArrayLike" if x.type is None else x.type.__name__ for x in operands]
    names = ["x", "y", "z"][: len(types)] if len(types) <= 3 else [f"x{i}" for i in range(len(types))]
    arguments = [f"{name}: {t}" for name, t in zip(names, types, strict=True)] + (["*", *params] if params else [])
    of = "_".join("array" if x.type is None else x.type.__name__.lower() for x in operands[:3])
    result = next(t for t, x in zip(types, operands, strict=True) if x.type is not None)
    name = str(operation).rsplit(".", 1)[-1]
    return f"@mx.register({spelling(operation)})\ndef {name}_{of}({', '.join(arguments)}) -> {result}: ..."


def spelling(operation: Any) -> str:
    """How code names a primitive or a function."""
    if hasattr(jax.lax, f"{operation}_p"):
        return f"lax.{operation}_p"
    return str(operation).replace("jax.numpy", "jnp") if "." in str(operation) else f"{operation}_p"
