"""Bound indices: limit the indices of run-time look-ups to the tensor that they read or write.

    take of float16, float32, float64           ──▶ NaN where the index is outside
    take of others                              ──▶ the nearest element
    gather_elements, gather_nd, scatter_nd      ──▶ indices limited to 0 … length − 1
    scatter_elements                            ──▶ indices limited to −length … length − 1
    roi_align, roi_pool                         ──▶ the image number of a region limited to 0 … images − 1

Requires: a normalised function ``main`` with static shapes.
Ensures: no index that is computed or is an input addresses memory outside the tensor; the meaning of valid indices is
unchanged. TVM's kernels check no index, so a token beyond the vocabulary could read the worker's memory or crash it.
Constant indices are left to the model's author.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.ir import constant, is_tensor_constant, operator_name, rewrite_main


@tvm.transform.module_pass(opt_level=0, name="BoundIndices")
class BoundIndices:
    """Bound the indices of the function ``main``."""

    def transform_module(self, module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
        def replacement(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
            bounded = _bounded(expression, builder)
            return None if bounded is None else builder.emit(bounded, name_hint=name)

        return rewrite_main(module, replacement)


def _bounded(expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
    """Return the same operation with its indices bounded; None if it needs no bound or its indices are constants."""
    operator = operator_name(expression)
    if operator not in _BOUNDED or is_tensor_constant(expression.args[1]):
        return None
    data, index, *rest = expression.args
    attributes = expression.attrs
    if operator in _OF_REGIONS:
        images = int(data.ty.shape.values[0])
        return relax.Call(expression.op, [data, _of_images(index, images, builder)], attributes)
    if operator == "relax.take":
        if attributes.mode != "fast":
            return None
        mode = "nan" if str(data.ty.dtype.dtype).startswith("float") else "clip"
        return relax.op.take(data, index, attributes.axis, mode)
    lengths = [int(length) for length in data.ty.shape.values]
    if operator == "relax.gather_elements":
        return relax.op.gather_elements(data, _limited(index, lengths[attributes.axis], builder), attributes.axis)
    if operator == "relax.scatter_elements":
        length = lengths[attributes.axis]
        inside = _limited(index, length, builder, lowest=-length)
        return relax.op.scatter_elements(data, inside, *rest, attributes.axis, attributes.reduction)
    coordinates = int(index.ty.shape.values[-1])
    if operator == "relax.gather_nd":
        first = int(attributes.batch_dims)
        inside = _limited(index, lengths[first : first + coordinates], builder)
        return relax.op.gather_nd(data, inside, first)
    return relax.op.scatter_nd(data, _limited(index, lengths[:coordinates], builder), *rest, attributes.reduction)


_OF_REGIONS = ("relax.vision.roi_align", "relax.vision.roi_pool")
_BOUNDED = (
    *_OF_REGIONS,
    "relax.take",
    "relax.gather_elements",
    "relax.gather_nd",
    "relax.scatter_elements",
    "relax.scatter_nd",
)


def _limited(
    index: relax.Expr, lengths: int | list[int], builder: relax.BlockBuilder, *, lowest: int = 0
) -> relax.Expr:
    """Limit an index, or the coordinates along its last axis, to ``lowest`` … ``lengths`` − 1."""
    return _between(index, np.array(lowest), np.asarray(lengths) - 1, builder)


def _of_images(regions: relax.Expr, images: int, builder: relax.BlockBuilder) -> relax.Expr:
    """Limit the image numbers (column 0) of regions to 0 … ``images`` − 1; the four coordinates are unchanged."""
    lowest, highest = np.full(5, -np.inf), np.full(5, np.inf)
    lowest[0], highest[0] = 0, images - 1
    return _between(regions, lowest, highest, builder)


def _between(tensor: relax.Expr, lowest: np.ndarray, highest: np.ndarray, builder: relax.BlockBuilder) -> relax.Expr:
    dtype = str(tensor.ty.dtype.dtype)
    above = builder.emit(relax.op.maximum(tensor, constant(lowest.astype(dtype))))
    return builder.emit(relax.op.minimum(above, constant(highest.astype(dtype))))
