"""Lower products and convolutions for a GPU to TE: one form of contraction, which reads its operands through views.

    left [batch, position, channel, rows], right [batch, position, channel, columns]
        -> product [batch, rows, columns] -> result

The sum runs over channels and over the positions of a convolution's kernel (a matrix has one position). ``left`` and
``right`` are views that are never in memory: a kernel computes them when it loads into shared memory (the image behind
a matrix of patches). Both have the sum's axis first, so that a thread's registers are contiguous there. The schedule
cuts a product into tiles and its sum into slices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from tvm import te

from schedules.blocks import ANCHOR
from schedules.gpu.tile import (
    DEPTH_FIRST,
    FETCH,
    STORE,
    TENSOR_CORE,
    TENSOR_CORE_SMALLEST,
    TILED,
    VECTORS,
    Extents,
    Gpu,
)
from schedules.relax_tools import accumulator_dtype, broadcast_index, ravel, unravel

Element = Callable[[Any, Any, Any, Any], Any]
"""Reads an operand's value at (batch, position, channel, row or column)."""


@dataclass(frozen=True)
class Operand:
    """An operand of a contraction: a view of an input.

    Elements are contiguous in memory in runs: of ``contiguous`` elements along the row or column axis, or of
    ``contiguous_depth`` elements along the sum.
    """

    element: Element
    dtype: str
    contiguous: int = 1
    contiguous_depth: int = 1


@dataclass(frozen=True)
class Contraction:
    """``batch`` matrix products [rows, depth] x [depth, columns] of ``left`` and ``right``.

    The results of a row are contiguous in memory in runs of ``contiguous`` elements. ``positions`` is the number of
    positions of a convolution's kernel, 1 for a matrix product; ``depth`` is ``positions`` times the channels.
    """

    left: Operand
    right: Operand
    batch: int
    rows: int
    columns: int
    depth: int
    out_dtype: str
    contiguous: int
    positions: int = 1

    @property
    def channels(self) -> int:
        return self.depth // self.positions

    @property
    def extents(self) -> Extents:
        return Extents(self.batch, self.rows, self.columns, self.depth)


SMALLEST_CHANNELS, SMALLEST_HALF_CHANNELS = 16, 32
"""The sum has a separate loop over positions if steps of this many channels divide the channels.

Then threads need not compute the positions. With fewer channels most of such a step would be zeros. The second value is
for tensor cores.
"""

Product = Callable[[Any, Any, Any], Any]
"""Reads the contraction's value at (batch, row, column), in the accumulator's dtype."""


def contract(contraction: Contraction, family: str, gpu: Gpu) -> Product:
    """Make the anchor block of a contraction; return the function by which the block that stores it reads its values.

    ``family`` is the operator's name; the block's rule is its tiled one, or ``tensor_core``. Tensor cores read the left
    operand by rows, as it lies in memory.
    """
    dtypes = contraction.left.dtype, contraction.right.dtype
    on_tensor_cores = uses_tensor_cores(gpu, contraction.extents, *dtypes)
    channels, positions = contraction.channels, contraction.positions
    left_element, right_element = contraction.left.element, contraction.right.element
    if positions > 1 and channels % (SMALLEST_HALF_CHANNELS if on_tensor_cores else SMALLEST_CHANNELS):
        left_element, right_element = (_along(element, channels) for element in (left_element, right_element))
        channels, positions = contraction.depth, 1
    outer = (contraction.batch, positions)
    if on_tensor_cores:
        operand = Operand(
            lambda batch, position, row, channel: left_element(batch, position, channel, row),
            contraction.left.dtype,
            contraction.left.contiguous_depth,
        )
        left = _view(operand, (*outer, contraction.rows, channels), "left")
    else:
        operand = replace(contraction.left, element=left_element)
        left = _view(operand, (*outer, channels, contraction.rows), "left")
    operand = replace(contraction.right, element=right_element)
    right = _view(operand, (*outer, channels, contraction.columns), "right")
    accumulator = accumulator_dtype(contraction.out_dtype) if not on_tensor_cores else "float32"
    position = te.reduce_axis((0, positions), name="position")
    channel = te.reduce_axis((0, channels), name="channel")

    def element(batch: Any, row: Any, column: Any) -> Any:
        factor = left[batch, position, row, channel] if on_tensor_cores else left[batch, position, channel, row]
        value = factor.astype(accumulator) * right[batch, position, channel, column].astype(accumulator)
        return te.sum(value, axis=[position, channel])

    product = te.compute(
        (contraction.batch, contraction.rows, contraction.columns),
        element,
        name=TENSOR_CORE if on_tensor_cores else family,
        attrs={
            ANCHOR: TENSOR_CORE if on_tensor_cores else f"{TILED}{family}",
            STORE: _vector(contraction.contiguous),
        },
    )
    return lambda batch, row, column: product[batch, row, column]


def uses_tensor_cores(gpu: Gpu, extents: Extents, *dtypes: str) -> bool:
    """Return whether tensor cores can compute a product: one dtype that they support, no extent below a fragment."""
    smallest = min(extents.rows, extents.columns, extents.depth)
    return len(set(dtypes)) == 1 and dtypes[0] in gpu.fragment_dtypes and smallest >= TENSOR_CORE_SMALLEST


def _along(element: Element, channels: int) -> Element:
    """Return the element function of an operand for a sum with one loop over positions and channels."""
    return lambda batch, _, k, at: element(batch, k // channels, k % channels, at)


def _view(operand: Operand, shape: tuple[int, int, int, int], name: str) -> te.Tensor:
    lanes = _vector(operand.contiguous) if shape[3] % _vector(operand.contiguous) == 0 else 1
    attributes = {FETCH: lanes, DEPTH_FIRST: int(operand.contiguous_depth > operand.contiguous)}
    return te.compute(shape, operand.element, name=name, attrs=attributes)


def _vector(contiguous: int) -> int:
    return next(lanes for lanes in VECTORS if contiguous % lanes == 0)


def matmul(left: te.Tensor, right: te.Tensor, out_dtype: str, gpu: Gpu) -> te.Tensor:
    """Return the product of left [..., M, K] and right [..., K, N], [..., M, N]; batch axes are broadcast."""
    left_shape, right_shape = ([int(extent) for extent in tensor.shape] for tensor in (left, right))
    (rows, depth), columns = left_shape[-2:], right_shape[-1]
    left_batch, right_batch = left_shape[:-2], right_shape[:-2]
    outer = np.broadcast_shapes(tuple(left_batch), tuple(right_batch))
    # If the whole batch shares one matrix, the batch becomes more rows.
    shared, batch_extent = prod(right_batch) == 1, prod(outer)
    batch, all_rows = (1, batch_extent * rows) if shared else (batch_extent, rows)

    def read_left(at: Any, _: Any, k: Any, row: Any) -> Any:
        if shared and batch_extent > 1:
            at, row = row // rows, row % rows
        return left[(*broadcast_index(unravel(at, outer), left_batch), row, k)]

    def read_right(at: Any, _: Any, k: Any, column: Any) -> Any:
        return right[(*broadcast_index(unravel(at, outer), right_batch), k, column)]

    product = contract(
        Contraction(
            left=Operand(read_left, str(left.dtype), contiguous_depth=depth),
            right=Operand(read_right, str(right.dtype), contiguous=columns),
            batch=batch,
            rows=all_rows,
            columns=columns,
            depth=depth,
            out_dtype=out_dtype,
            contiguous=columns,
        ),
        "matmul",
        gpu,
    )

    def store(*index: Any) -> Any:
        *at, row, column = index
        flat = ravel(at, outer)
        value = product(0, flat * rows + row, column) if shared else product(flat, row, column)
        return value.astype(out_dtype)

    return te.compute((*outer, rows, columns), store, name="store")
