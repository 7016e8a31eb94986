"""`LoraArray`: a weight with a low-rank update, never merged (Hu et al. 2021, arXiv:2106.09685).

    w = LoraArray.init(w, rank=8, key=key)
    mx.wrap(model)({"w": w}, x)              # x @ w is x @ w.w + (x @ w.b) @ w.a, scaled

The weight ``w`` may itself be a value, for example a `QuantizedArray`.
"""

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

import morphax as mx


class LoraArray(mx.ArrayValue):
    """Stands for ``w + alpha / rank * b @ a``, in the dtype of ``w``.

    Attributes:
        w: The weight, shape ``(*batch, m, n)``: an array or a value.
        a: Shape ``(*batch, rank, n)``.
        b: Shape ``(*batch, m, rank)``; zero at the start.
        alpha: Scales the update, together with the rank.
        frozen: Whether ``w`` is a constant to derivatives, so that only ``a`` and ``b`` are trained. A scalar times a frozen
            array is not frozen: its weight depends on the scalar.
    """

    w: Any
    a: Array
    b: Array
    alpha: float = mx.field(static=True, default=1.0)
    frozen: bool = mx.field(static=True, default=True)

    @classmethod
    def init(cls, w: Any, rank: int, *, key: Array, alpha: float | None = None, frozen: bool = True) -> "LoraArray":
        """Give a weight an update that starts at zero.

        Args:
            w: Shape ``(*batch, m, n)``, floating: an array or a value.
            rank: The rank of the update, 1 to min(m, n).
            key: Draws ``a``, normal with variance 1 / n.
            alpha: By default the rank, so that the scale is 1.
            frozen: As the attribute.

        Raises:
            TypeError: If ``rank`` is no integer, or ``w`` is not floating.
            ValueError: If ``w`` is no matrix, or the rank does not fit it.
        """
        shape, dtype = jax.typeof(w).shape, jax.typeof(w).dtype
        if len(shape) < 2:
            raise ValueError(
                f"a LoRA update is a product of two matrices, and `w` has shape {shape}: it needs two dimensions."
            )
        if not isinstance(rank, Integral) or isinstance(rank, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"`rank` must be an integer, got {rank!r}.")
        *batch, m, n = shape
        if not 1 <= rank <= min(m, n):
            raise ValueError(f"`rank` must lie between 1 and {min(m, n)} for a weight of shape {shape}, got {rank}.")
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"`w` has dtype {dtype}; an update needs a floating weight (quantize it with `QuantizedArray`)."
            )
        a = jax.random.normal(key, (*batch, rank, n), dtype) / jnp.sqrt(n).astype(dtype)
        return cls(w, a, jnp.zeros((*batch, m, rank), dtype), float(rank if alpha is None else alpha), frozen)

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.a.shape[-2]

    @property
    def scaling(self) -> float:
        """The factor of the update: ``alpha / rank``."""
        return self.alpha / self.rank

    @property
    def weight(self) -> Any:
        """The weight as derivatives see it."""
        return lax.stop_gradient(self.w) if self.frozen else self.w

    @property
    def factors(self) -> tuple[Array, Array]:
        """``a`` and ``b`` in the dtype of the weight: they may be kept in a wider one."""
        return self.a.astype(self.dtype), self.b.astype(self.dtype)

    def aval(self) -> Any:
        """The type of the weight."""
        return jax.typeof(self.w).update(weak_type=False)

    def __jax_array__(self) -> Array:
        a, b = self.factors
        return self.weight + self.scaling * (b @ a)

    def like(self, w: Any, a: Any, b: Any) -> "LoraArray":
        """Return a value of the same scaling with other parts."""
        return LoraArray(w, a, b, self.alpha, self.frozen)


# A LoRA rule splits the operation into operations on the parts, where the other operand's rules find it again: it goes first,
# and of two LoRA weights that of the left one.


@mx.register(lax.dot_general_p, precedence=2)
def dot_general_lora_any(x: LoraArray, y: Any, *, dimension_numbers: Any, **params: Any):
    """``(w + s b a) y = w y + s b (a y)``."""
    (lc, _), (lb, _) = dimension_numbers
    k = len(x.shape) - 2
    along_a_matrix = tuple(lb) == tuple(range(k)) and len(lc) == 1
    if not along_a_matrix and params.get("out_sharding") is not None:
        return NotImplemented
    full = lax.dot_general(x.weight, y, dimension_numbers, **params)
    if not along_a_matrix:
        return full + x.scaling * _contract(x, y, dimension_numbers, params)
    lead = tuple(range(k))
    a, b = x.factors
    inner, outer, rank_axis = (a, b, k + 1) if lc[0] == k + 1 else (b, a, k)
    low = lax.dot_general(inner, y, dimension_numbers, **_unsharded_along(k, params))
    return full + x.scaling * lax.dot_general(outer, low, (((rank_axis,), (k,)), (lead, lead)), **params)


@mx.register(lax.dot_general_p, precedence=1)
def dot_general_any_lora(x: Any, y: LoraArray, *, dimension_numbers: Any, **params: Any):
    """``x (w + s b a) = x w + s (x b) a``."""
    (lc, rc), (lb, rb) = dimension_numbers
    k = len(y.shape) - 2
    along_a_matrix = tuple(rb) == tuple(range(k)) and len(rc) == 1
    if not along_a_matrix and params.get("out_sharding") is not None:
        return NotImplemented
    full = lax.dot_general(x, y.weight, dimension_numbers, **params)
    if not along_a_matrix:
        update = _contract(y, x, ((rc, lc), (rb, lb)), params)
        return full + y.scaling * _free_axes_swapped(update, len(lb), len(y.shape) - len(rb) - len(rc))
    lead = tuple(range(k))
    a, b = y.factors
    inner, outer, rank_axis = (b, a, k) if rc[0] == k else (a, b, k + 1)
    rank_last = full.ndim - 1
    low = lax.dot_general(x, inner, dimension_numbers, **_unsharded_along(rank_last, params))
    return full + y.scaling * lax.dot_general(low, outer, (((rank_last,), (rank_axis,)), (lead, lead)), **params)


def _unsharded_along(axis: int, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a product whose result has the rank at ``axis``, which is too short to be sharded."""
    sharding = params.get("out_sharding")
    if sharding is None:
        return params
    spec = (None if i == axis else names for i, names in enumerate(sharding.spec))
    return {**params, "out_sharding": NamedSharding(sharding.mesh, PartitionSpec(*spec))}


def _contract(x: LoraArray, y: Any, dimension_numbers: Any, params: dict[str, Any]) -> Array:
    """``(b a) y`` for any contraction; the order of the three products is chosen by their cost."""
    (lc, rc), (lb, rb) = dimension_numbers
    *lead, m, n = range(len(x.shape))
    rank = len(x.shape)
    of_y = {j: i for i, j in zip((*lb, *lc), (*rb, *rc), strict=True)}
    ys = [of_y.get(j, rank + 1 + j) for j in range(y.ndim)]
    free = [i for i in range(len(x.shape)) if i not in (*lb, *lc)]
    out = [*lb, *free, *(i for i in ys if i > rank)]
    options = {name: params[name] for name in ("precision", "preferred_element_type") if name in params}
    a, b = x.factors
    return jnp.einsum(b, [*lead, m, rank], a, [*lead, rank, n], y, ys, out, **options)


def _free_axes_swapped(x: Array, num_batch: int, num_first: int) -> Array:
    """Put the last free axes of a contraction before its first ones."""
    batch, rest = range(num_batch), range(num_batch, x.ndim)
    return lax.transpose(x, (*batch, *rest[num_first:], *rest[:num_first]))


@mx.register(lax.transpose_p)
def transpose_lora(x: LoraArray, *, permutation: Any):
    """``(w + s b a)^T = w^T + s a^T b^T``; the last two axes must stay the last two."""
    k = len(x.shape) - 2
    if set(permutation[k:]) != {k, k + 1}:
        return NotImplemented
    w, a, b = (lax.transpose(part, permutation) for part in (x.w, x.a, x.b))
    return x.like(w, a, b) if permutation[k] == k else x.like(w, b, a)


@mx.register(lax.gather_p)
def gather_rows_lora(
    x: LoraArray, indices: ArrayLike, *, dimension_numbers: Any, slice_sizes: Any, fill_value: Any, **params: Any
):
    """Rows of the weight plus rows of ``b`` times ``a``: an embedding lookup."""
    rows = tuple(slice_sizes) == (1, x.shape[1]) and dimension_numbers.start_index_map == (0,)
    last = jnp.ndim(indices) - 1
    if not rows or dimension_numbers.collapsed_slice_dims != (0,) or dimension_numbers.offset_dims != (last,):
        return NotImplemented
    a, b = x.factors
    w = lax.gather(x.weight, indices, dimension_numbers, slice_sizes, fill_value=fill_value, **params)
    b = lax.gather(b, indices, dimension_numbers, (1, x.rank), fill_value=0, **params)  # no update out of range
    return w + x.scaling * (b @ a)


@mx.register(lax.mul_p)
def mul_lora_scalar(x: LoraArray, y: ArrayLike):
    """A scalar scales the weight and the update. Only the weight is frozen, and not what depends on the scalar."""
    return LoraArray(x.weight * y, x.a, x.b * y, x.alpha, frozen=False) if jnp.ndim(y) == 0 else NotImplemented


@mx.register(lax.mul_p)
def mul_scalar_lora(x: ArrayLike, y: LoraArray):
    """A scalar scales the weight and the update."""
    return mul_lora_scalar(y, x)


@mx.register(lax.div_p)
def div_lora_scalar(x: LoraArray, y: ArrayLike):
    """A scalar scales the weight and the update."""
    return LoraArray(x.weight / y, x.a, x.b / y, x.alpha, frozen=False) if jnp.ndim(y) == 0 else NotImplemented


@mx.register(lax.neg_p)
def neg_lora(x: LoraArray):
    """The negative of both parts."""
    return x.like(-x.w, x.a, -x.b)


@mx.register(lax.convert_element_type_p)
def convert_lora(x: LoraArray, *, new_dtype: Any, weak_type: Any, sharding: Any):
    """All parts are converted, from one floating type to another."""
    floating = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(new_dtype, jnp.floating)
    if not floating or weak_type or sharding is not None:
        return NotImplemented
    return x.like(x.w.astype(new_dtype), x.a.astype(new_dtype), x.b.astype(new_dtype))
