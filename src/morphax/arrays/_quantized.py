"""`QuantizedArray`: int8 numbers with a floating scale for each channel (Jacob et al. 2018, arXiv:1712.05877).

    w = QuantizedArray.quantize(w, axis=-1)   # one scale per row
    mx.wrap(model)({"w": w}, x)

Products use the integers and scale the result, so the weight is never made dense.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

import morphax as mx


class QuantizedArray(mx.ArrayValue):
    """Stands for ``qvalue * scale``, symmetric quantization.

    Its derivative is that of the dense array: floating, through the scale; the integers are constants.

    Attributes:
        qvalue: int8.
        scale: Floating, of as many dimensions as ``qvalue``; an axis of length 1 shares one scale. Its dtype is that of the
            array.
    """

    qvalue: Array
    scale: Array

    def __check_init__(self) -> None:
        q, s = jnp.shape(self.qvalue), jnp.shape(self.scale)
        if len(q) != len(s) or any(m not in (1, n) for m, n in zip(s, q, strict=True)):
            raise ValueError(
                f"`scale` of shape {s} does not fit `qvalue` of shape {q}: each axis has its length, or length 1."
            )

    @classmethod
    def quantize(cls, x: ArrayLike, *, axis: int | Sequence[int] = -1) -> "QuantizedArray":
        """Round an array to int8, the largest magnitude along ``axis`` becoming 127.

        Args:
            x: Floating.
            axis: The axis or axes that share one scale.

        Raises:
            TypeError: If ``x`` is not floating.

        Cost: one pass over ``x``. ``qvalue * scale`` differs from ``x`` by at most half the scale, before it is rounded to
        the dtype. A slice that holds what is not finite becomes NaN.
        """
        x = jnp.asarray(x)
        dtype = x.dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"`quantize` takes a floating array, got dtype {dtype}.")
        x = x.astype(_accumulator(dtype))  # bfloat16 does not count to 127 in halves
        largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0)
        scale = jnp.maximum(largest / 127, jnp.finfo(x.dtype).tiny).astype(dtype)
        too_small = 127.5 * scale.astype(x.dtype) < largest  # rounded down among the last of float16, 2 ** -24 apart
        scale = jnp.where(largest == 0, 1, scale + jnp.where(too_small, 2.0**-24, 0.0)).astype(dtype)
        return cls(jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale)

    def aval(self) -> Any:
        """The shape of the integers, the dtype of the scale."""
        return jax.typeof(self.qvalue).update(dtype=self.scale.dtype, weak_type=False)

    def __jax_array__(self) -> Array:
        return self.qvalue.astype(self.scale.dtype) * self.scale

    def is_shared(self, axis: int) -> bool:
        """Whether one scale serves the whole axis."""
        return self.scale.shape[axis] == 1


def _accumulator(dtype: Any) -> Any:
    """The dtype that products of integers are summed in: float16 ends at 65504."""
    return jnp.promote_types(dtype, jnp.float32)


def _unit(dtype: Any) -> int:
    """How many scales multiply an operand at a time: float16 has few digits below 6e-5, where single ones may lie."""
    return 64 if dtype == jnp.float16 else 1


@mx.register(lax.dot_general_p)
def dot_general_quantized_array(
    x: QuantizedArray, y: ArrayLike, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
):
    """``(q s) y = s (q y)`` where the scale does not vary along what is summed, ``q (s y)`` where it varies only there."""
    y = jnp.asarray(y)
    y = jnp.asarray(y)
    (lc, rc), (lb, rb) = dimension_numbers
    free = [i for i in range(x.ndim) if i not in lc and i not in lb]
    common = jnp.promote_types(x.dtype, y.dtype)
    out_type = preferred_element_type or common
    params["preferred_element_type"] = _accumulator(out_type)
    q = x.qvalue.astype(x.dtype)
    if all(map(x.is_shared, lc)):
        out = lax.dot_general(q, y, dimension_numbers, **params)
        scale = lax.transpose(x.scale, (*lb, *free, *lc))
        after = out.ndim - len(lb) - len(free)
        scale = scale.reshape(*scale.shape[: len(lb) + len(free)], *[1] * after)
        return (out * scale.astype(out.dtype)).astype(out_type)
    if all(map(x.is_shared, free)):
        of_y = dict(zip((*rb, *rc), (*lb, *lc), strict=True))
        order = [of_y.get(j) for j in range(y.ndim)]
        scale = lax.transpose(x.scale, (*(i for i in order if i is not None), *free))
        unit = _unit(common)
        scale = unit * scale.reshape([1 if i is None else x.scale.shape[i] for i in order]).astype(common)
        return (lax.dot_general(q, y.astype(common) * scale, dimension_numbers, **params) / unit).astype(out_type)
    return NotImplemented


@mx.register(lax.dot_general_p)
def dot_general_array_quantized(
    x: ArrayLike, y: QuantizedArray, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any
):
    """As with the operands exchanged; the free axes of ``x`` come first."""
    x = jnp.asarray(x)
    x = jnp.asarray(x)
    (lc, rc), (lb, rb) = dimension_numbers
    free = [j for j in range(y.ndim) if j not in rc and j not in rb]
    common = jnp.promote_types(x.dtype, y.dtype)
    out_type = preferred_element_type or common
    params["preferred_element_type"] = _accumulator(out_type)
    q = y.qvalue.astype(y.dtype)
    if all(map(y.is_shared, rc)):
        out = lax.dot_general(x, q, dimension_numbers, **params)
        scale = lax.transpose(y.scale, (*rb, *free, *rc))
        batch, own = scale.shape[: len(rb)], scale.shape[len(rb) : len(rb) + len(free)]
        scale = scale.reshape(*batch, *[1] * (out.ndim - len(batch) - len(own)), *own)
        return (out * scale.astype(out.dtype)).astype(out_type)
    if all(map(y.is_shared, free)):
        of_x = dict(zip((*lb, *lc), (*rb, *rc), strict=True))
        order = [of_x.get(i) for i in range(x.ndim)]
        scale = lax.transpose(y.scale, (*(j for j in order if j is not None), *free))
        unit = _unit(common)
        scale = unit * scale.reshape([1 if j is None else y.scale.shape[j] for j in order]).astype(common)
        return (lax.dot_general(x.astype(common) * scale, q, dimension_numbers, **params) / unit).astype(out_type)
    return NotImplemented


@mx.register(lax.transpose_p)
def transpose_quantized(x: QuantizedArray, *, permutation: Any):
    """Both parts are transposed."""
    return QuantizedArray(lax.transpose(x.qvalue, permutation), lax.transpose(x.scale, permutation))


@mx.register(lax.gather_p)
def gather_slices_quantized(
    x: QuantizedArray, indices: ArrayLike, *, dimension_numbers: Any, slice_sizes: Any, fill_value: Any, **params: Any
):
    """The dense slices: an embedding lookup. Along a shared axis the scale has one element."""
    indexed = (*dimension_numbers.start_index_map, *dimension_numbers.operand_batching_dims)
    shape = tuple(n if i in indexed else x.scale.shape[i] for i, n in enumerate(x.shape))
    if x.scale.shape != shape == x.shape:
        return NotImplemented  # a scale for each index would be as large as the array
    scale = jnp.broadcast_to(x.scale, shape)
    sizes = tuple(min(n, m) for n, m in zip(slice_sizes, shape, strict=True))
    q = lax.gather(x.qvalue, indices, dimension_numbers, slice_sizes, fill_value=1, **params)
    return q.astype(x.dtype) * lax.gather(scale, indices, dimension_numbers, sizes, fill_value=fill_value, **params)


@mx.register(lax.mul_p)
def mul_quantized_scalar(x: QuantizedArray, y: ArrayLike):
    """A scalar scales the scale."""
    return QuantizedArray(x.qvalue, x.scale * y) if jnp.ndim(y) == 0 else NotImplemented


@mx.register(lax.mul_p)
def mul_scalar_quantized(x: ArrayLike, y: QuantizedArray):
    """A scalar scales the scale."""
    return mul_quantized_scalar(y, x)


@mx.register(lax.div_p)
def div_quantized_scalar(x: QuantizedArray, y: ArrayLike):
    """A scalar scales the scale."""
    return QuantizedArray(x.qvalue, x.scale / y) if jnp.ndim(y) == 0 else NotImplemented


@mx.register(lax.neg_p)
def neg_quantized(x: QuantizedArray):
    """The negative scale."""
    return QuantizedArray(x.qvalue, -x.scale)


@mx.register(lax.convert_element_type_p)
def convert_quantized(x: QuantizedArray, *, new_dtype: Any, weak_type: Any, sharding: Any):
    """A floating type is that of the scale."""
    if not jnp.issubdtype(new_dtype, jnp.floating) or weak_type or sharding is not None:
        return NotImplemented
    return QuantizedArray(x.qvalue, x.scale.astype(new_dtype))
