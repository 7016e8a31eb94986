"""`shard_map` and `pmap` inside a wrapped function."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .. import _jax
from .._differentiation import meaning
from .._trace import CONSTRUCTS, DispatchTrace, subtrace, treatment
from .._value import flatten, is_value
from ._body import flatten_all


@treatment(CONSTRUCTS, _jax.shard_map_p)
def shard_map(trace: DispatchTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind the call over leaves; results are arrays.

    A specification names dimensions of the array. A replicated value has replicated leaves; one that is cut stays a value
    only if its array is its one leaf.
    """
    (fun,) = params["subfuns"]
    specs = params["in_specs"]
    operands = [
        x if not is_value(x) or _is_replicated(spec) or _is_its_leaf(x) else trace.dense(x)
        for x, spec in zip(operands, specs, strict=True)
    ]
    leaves, slots = flatten_all(trace, operands)
    tag = trace.tag

    def fun_over_leaves(*leaves):
        with subtrace(tag) as inner:
            boxed = [inner.box(x) for x in slots.build(leaves)]
            with _jax.set_current_trace(inner):
                outs, out_specs = fun(*boxed).unpack_aux()
            return outs.map(lambda x: _dense(inner, x)).with_aux(out_specs)

    new = dict(
        params,
        subfuns=(fun_over_leaves,),
        in_specs=tuple(spec for spec, n in zip(specs, slots.counts, strict=True) for _ in range(n)),
        debug_info=params["debug_info"].with_unknown_names(),
    )
    return primitive.bind(*leaves, **new)


def _dense(trace: DispatchTrace, x: Any) -> Any:
    x = trace.unbox(x)
    return trace.dense(x) if is_value(x) else x


def _is_replicated(spec: Any) -> bool:
    return isinstance(spec, PartitionSpec) and all(axis is None for axis in spec)


def _is_its_leaf(x: Any) -> bool:
    leaves, structure = flatten(x)
    return structure is not None and meaning(structure, [_jax.typeof(leaf) for leaf in leaves]).identity
