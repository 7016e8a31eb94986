"""`shard_map` and `pmap` inside a wrapped function."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .. import _jax
from .._differentiation import is_leafwise
from .._trace import CONSTRUCTS, DispatchTrace, subtrace, treatment
from .._value import Structure, flatten, is_value
from ._body import flatten_all


@treatment(CONSTRUCTS, _jax.shard_map_p)
def shard_map(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind the call over leaves.

    A specification names dimensions of the array. A replicated value has replicated leaves; one that is cut, or comes out,
    stays a value only if its array is its one leaf.
    """
    (fun,) = params["subfuns"]
    specs = params["in_specs"]
    operands = [
        x if not is_value(x) or _is_replicated(spec) or _is_its_leaf(x) else trace.dense(x)
        for x, spec in zip(operands, specs, strict=True)
    ]
    leaves, slots = flatten_all(trace, operands)
    tag = trace.tag
    structures: list[Structure | None] = []  # of the results

    def fun_over_leaves(*leaves: Any):
        with subtrace(tag) as inner:
            boxed = [inner.box(x) for x in slots.build(leaves)]
            with _jax.set_current_trace(inner):
                outs, out_specs = fun(*boxed).unpack_aux()
            structures.clear()
            return outs.map(lambda x: _result(inner, x, structures)).with_aux(out_specs)

    new = dict(
        params,
        subfuns=(fun_over_leaves,),
        in_specs=tuple(spec for spec, n in zip(specs, slots.counts, strict=True) for _ in range(n)),
        debug_info=params["debug_info"].with_unknown_names(),
    )
    outs = primitive.bind(*leaves, **new)
    forms = iter(structures)
    return outs.map(lambda x: x if (s := next(forms)) is None else s.build([x]))


def _result(trace: DispatchTrace, x: Any, structures: list[Structure | None]) -> Any:
    """Return the one array that a result is, and note what it stands for."""
    x = trace.unbox(x)
    if is_value(x) and _is_its_leaf(x):
        (x,), structure = flatten(x)
        structures.append(structure)
        return x
    structures.append(None)
    return trace.dense(x) if is_value(x) else x


def _is_replicated(spec: Any) -> bool:
    return isinstance(spec, PartitionSpec) and all(axis is None for axis in spec)


def _is_its_leaf(x: Any) -> bool:
    leaves, structure = flatten(x)
    return structure is not None and is_leafwise(structure, [_jax.typeof(leaf) for leaf in leaves])
