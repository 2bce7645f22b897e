"""Bound indices: limit the indices of look-ups to the tensor that they read or write.

    take of float16, float32, float64           ──▶ NaN where the index is outside
    take of others                              ──▶ the nearest element
    gather_elements, gather_nd, scatter_nd      ──▶ indices limited to 0 … length − 1
    index_tensor                                ──▶ indices limited to 0 … length − 1
    index_put, scatter_elements                 ──▶ indices limited to −length … length − 1
    reverse_sequence                            ──▶ lengths limited to 0 … length
    roi_align, roi_pool                         ──▶ the image number of a region limited to 0 … images − 1

Requires: a normalised function ``main`` with static shapes.
Ensures: no index addresses memory outside the tensor; the meaning of valid indices is unchanged. TVM's kernels check no
index, so a token beyond the vocabulary could read the worker's memory or crash it. Constant indices are limited here:
they cost nothing at run time, and valid ones are unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax

from relay_passes.ir import call_like, constant, is_tensor_constant, main_pass, operator_name, shape_of

Lengths = Sequence[int]
"""The lengths of the axes of the tensor that the indices address."""
Bounds = tuple[Any, Any]
"""The lowest and the highest index: numbers, or an array of one number for each coordinate or each index of a tuple."""


@main_pass("BoundIndices")
def bound_indices(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
    bounded = _bounded(expression, builder)
    return None if bounded is None else builder.emit(bounded, name_hint=name)


def _bounded(call: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
    """Return the same operation with its indices bounded; None if it has none, or its indices are valid constants."""
    name = operator_name(call)
    if name not in _BOUNDS:
        return None
    data, index, *rest = call.args
    bounds = _BOUNDS[name](shape_of(data), call)
    if name == "relax.take":
        if call.attrs.mode != "fast" or (is_tensor_constant(index) and _limited(index, *bounds, builder) is index):
            return None
        mode = "nan" if str(data.ty.dtype.dtype).startswith("float") else "clip"
        return relax.op.take(data, index, call.attrs.axis, mode)
    inside = _limited(index, *bounds, builder)
    return None if inside is index else call_like(call, [data, inside, *rest])


def _along(attribute: str, *, from_the_end: bool = False) -> Callable[[Lengths, relax.Call], Bounds]:
    """Return a function for the bounds of indices along the axis in ``attribute``.

    With ``from_the_end``, negative indices are valid and count from the end.
    """

    def bounds(lengths: Lengths, call: relax.Call) -> Bounds:
        length = lengths[getattr(call.attrs, attribute) or 0]
        return -length if from_the_end else 0, length - 1

    return bounds


def _of_coordinates(lengths: Lengths, call: relax.Call) -> Bounds:
    """Return the bounds of coordinates, which lie along the last axis of the index."""
    first = int(getattr(call.attrs, "batch_dims", 0))
    last = first + shape_of(call.args[1])[-1]
    return 0, np.array(lengths[first:last]) - 1


def _of_images(lengths: Lengths, call: relax.Call) -> Bounds:
    """Return the bounds of regions [image number, four coordinates], of which only the image number is limited."""
    return np.array([0, *[-np.inf] * 4]), np.array([lengths[0] - 1, *[np.inf] * 4])


_BOUNDS: dict[str, Callable[[Lengths, relax.Call], Bounds]] = {
    "relax.take": _along("axis"),
    "relax.gather_elements": _along("axis"),
    "relax.scatter_elements": _along("axis", from_the_end=True),
    "relax.gather_nd": _of_coordinates,
    "relax.scatter_nd": _of_coordinates,
    "relax.index_tensor": lambda lengths, call: (np.zeros(len(lengths), int), np.array(lengths) - 1),
    "relax.index_put": lambda lengths, call: (-np.array(lengths), np.array(lengths) - 1),
    "relax.reverse_sequence": lambda lengths, call: (0, lengths[call.attrs.seq_axis]),
    "relax.vision.roi_align": _of_images,
    "relax.vision.roi_pool": _of_images,
}


def _limited(index: relax.Expr, lowest: Any, highest: Any, builder: relax.BlockBuilder) -> relax.Expr:
    """Return an index limited to its bounds: itself if it is a valid constant, else another constant or a variable.

    A tuple has an index for each axis, and bounds for each.
    """
    if isinstance(index, relax.Tuple):
        parts = zip(index.fields, lowest, highest, strict=False)
        return relax.Tuple([_limited(part, low, high, builder) for part, low, high in parts])
    dtype = np.dtype(str(index.ty.dtype.dtype))
    if dtype.kind in "iu":  # a narrow dtype cannot hold all lengths
        lowest, highest = (np.clip(bound, np.iinfo(dtype).min, np.iinfo(dtype).max) for bound in (lowest, highest))
    lowest, highest = np.asarray(lowest, dtype), np.asarray(highest, dtype)
    if not is_tensor_constant(index):
        above = builder.emit(relax.op.maximum(index, constant(lowest)))
        return builder.emit(relax.op.minimum(above, constant(highest)))
    numbers = index.value.numpy()
    limited = np.fmin(np.fmax(numbers, lowest), highest)
    return index if np.array_equal(numbers, limited) else constant(limited)
