"""Products and convolutions for a GPU -> TE: one shape of contraction, read through views that no memory holds.

    left [batch, position, channel, rows], right [batch, position, channel, columns]
        -> product [slice, batch, rows, columns] -> result

The sum runs over the positions of a convolution's kernel (a matrix has one) and over channels.
``left`` and ``right`` are views: a kernel's loads into shared memory compute them (zeros beyond the edges, the image
behind a matrix of patches). Both have the sum's axis first, so that a thread's registers are contiguous there. Long
sums of small products are cut into slices that different multiprocessors compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tvm import te, tirx

from tvm_split.schedules.blocks import ANCHOR
from tvm_split.schedules.expressions import accumulator_dtype
from tvm_split.schedules.gpu.tile import (
    DEPTH_FIRST,
    FETCH,
    FEW_ROWS,
    MOST_ROWS,
    STORE,
    TENSOR_CORE,
    TENSOR_CORE_SMALLEST,
    TILE,
    TILED,
    VECTORS,
    Extents,
    FragmentTile,
    Gpu,
    Tile,
    choose_fragment_tile,
    choose_slices,
    choose_tile,
)

Element = Callable[[Any, Any, Any, Any], Any]
"""An operand's value at (batch, position, channel, row or column)."""


@dataclass(frozen=True)
class Operand:
    """A view on an input.

    ``contiguous`` elements along its row or column axis lie side by side in memory, or ``contiguous_depth`` of them
    along the sum: runs of so many, one after another.
    """

    element: Element
    dtype: str
    contiguous: int = 1
    contiguous_depth: int = 1


@dataclass(frozen=True)
class Contraction:
    """``batch`` sums over ``depth`` of ``left * right``, each [rows, columns].

    The results of a row lie side by side in memory in runs of ``contiguous``. The sum runs over ``positions`` of a
    kernel, and in each over ``depth / positions`` channels.
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


Product = Callable[[Any, Any, Any], Any]
"""The contraction's value at (batch, row, column), slices added up, in the accumulator's dtype."""


def contract(contraction: Contraction, family: str, gpu: Gpu) -> Product:
    """The anchor block of a contraction, tiled for its extents, as a function for the block that stores the result.

    ``family`` is the operator's name; it becomes the chosen rule's name.
    """
    if contraction.rows <= MOST_ROWS:
        return _few_rows(contraction, gpu.processors)
    if contraction.columns <= MOST_ROWS:
        left, right, rows, columns = contraction.right, contraction.left, contraction.columns, contraction.rows
        exchanged = replace(contraction, left=left, right=right, rows=rows, columns=columns)
        turned = _few_rows(exchanged, gpu.processors)
        return lambda batch, row, column: turned(batch, column, row)
    if uses_tensor_cores(gpu, contraction.extents, contraction.left.dtype, contraction.right.dtype):
        return _tiled(contraction, TENSOR_CORE, gpu.processors)
    return _tiled(contraction, family, gpu.processors)


def uses_tensor_cores(gpu: Gpu, extents: Extents, *dtypes: str) -> bool:
    """One kind of half precision that this GPU's tensor cores multiply, and no extent smaller than a fragment."""
    smallest = min(extents.rows, extents.columns, extents.depth)
    return len(set(dtypes)) == 1 and dtypes[0] in gpu.fragment_dtypes and smallest >= TENSOR_CORE_SMALLEST


@dataclass(frozen=True)
class _Steps:
    """The order of a sum: in each of ``slices``, position by position, ``slice_channels`` channels.

    ``channels`` of all slices' are not zeros beyond the end.
    """

    slices: int
    positions: int
    slice_channels: int
    channels: int

    @property
    def padded_channels(self) -> int:
        return self.slices * self.slice_channels

    def axes(self) -> list[Any]:
        extents = {"position": self.positions, "channel": self.slice_channels}
        return [te.reduce_axis((0, extent), name=name) for name, extent in extents.items()]


def _steps(contraction: Contraction, slices: int, unit: int) -> _Steps:
    """Positions are a loop of their own where whole tiles fit their channels: threads need not compute them then."""
    channels = contraction.channels
    if channels % unit == 0:
        fitting = next(count for count in range(slices, 0, -1) if channels % (count * unit) == 0)
        return _Steps(fitting, contraction.positions, channels // fitting, channels)
    return _Steps(slices, 1, _whole(contraction.depth, slices, unit), contraction.depth)


def _element(contraction: Contraction, operand: Operand, steps: _Steps) -> Element:
    """An operand's element, for steps with or without a loop over positions."""
    if steps.positions == contraction.positions:
        return operand.element
    channels = contraction.channels
    return lambda batch, _, k, at: operand.element(batch, k // channels, k % channels, at)


def _tiled(contraction: Contraction, family: str, processors: int) -> Product:
    """Extents padded to whole tiles, with zeros that the views give.

    For tensor cores the left operand is read by rows, as it lies in memory.
    """
    on_tensor_cores = family == TENSOR_CORE
    choose: Callable[[Extents, int], tuple[Tile | FragmentTile, int]]
    choose = choose_fragment_tile if on_tensor_cores else choose_tile
    tile, slices = choose(contraction.extents, processors)
    steps = _steps(contraction, slices, tile.depth)
    rows, columns = _whole(contraction.rows, 1, tile.rows), _whole(contraction.columns, 1, tile.columns)
    outer, summed = (contraction.batch, steps.positions), steps.padded_channels
    by_depth = _element(contraction, contraction.left, steps)
    if on_tensor_cores:
        operand = Operand(
            lambda batch, position, row, channel: by_depth(batch, position, channel, row),
            contraction.left.dtype,
            contraction.left.contiguous_depth,
        )
        left = _view(operand, (*outer, rows, summed), (contraction.rows, steps.channels), "left")
    else:
        operand = replace(contraction.left, element=by_depth)
        left = _view(operand, (*outer, summed, rows), (steps.channels, contraction.rows), "left")
    operand = replace(contraction.right, element=_element(contraction, contraction.right, steps))
    right = _view(operand, (*outer, summed, columns), (steps.channels, contraction.columns), "right")
    accumulator = accumulator_dtype(contraction.out_dtype) if not on_tensor_cores else "float32"
    position, channel = steps.axes()

    def element(part: Any, batch: Any, row: Any, column: Any) -> Any:
        k = part * steps.slice_channels + channel
        factor = left[batch, position, row, k] if on_tensor_cores else left[batch, position, k, row]
        value = factor.astype(accumulator) * right[batch, position, k, column].astype(accumulator)
        return te.sum(value, axis=[position, channel])

    product = te.compute(
        (steps.slices, contraction.batch, rows, columns),
        element,
        name=family,
        attrs={
            ANCHOR: TENSOR_CORE if on_tensor_cores else f"{TILED}{family}",
            TILE: tile.name,
            STORE: _vector(contraction.contiguous),
        },
    )
    return _added_up(product, steps.slices)


def _few_rows(contraction: Contraction, processors: int) -> Product:
    """Few rows: every weight is used once, so that nothing is gained by sharing it; slices keep all memory busy."""
    slices = choose_slices(contraction.batch, contraction.columns, contraction.depth, processors)
    slice_depth = _whole(contraction.depth, slices, 1)
    accumulator = accumulator_dtype(contraction.out_dtype)
    k = te.reduce_axis((0, slice_depth), name="k")

    def element(part: Any, batch: Any, row: Any, column: Any) -> Any:
        at = part * slice_depth + k
        inside = (at // contraction.channels, at % contraction.channels)
        left = contraction.left.element(batch, *inside, row).astype(accumulator)
        value = left * contraction.right.element(batch, *inside, column).astype(accumulator)
        if slice_depth * slices > contraction.depth:
            value = tirx.if_then_else(at < contraction.depth, value, tirx.const(0, accumulator))
        return te.sum(value, axis=k)

    product = te.compute(
        (slices, contraction.batch, contraction.rows, contraction.columns),
        element,
        name="few_rows",
        attrs={ANCHOR: FEW_ROWS},
    )
    return _added_up(product, slices)


def _view(operand: Operand, shape: tuple[int, int, int, int], extents: tuple[int, int], name: str) -> te.Tensor:
    """An operand with zeros beyond the ``extents`` of its last two axes."""
    lanes = _vector(operand.contiguous) if extents[1] % _vector(operand.contiguous) == 0 else 1

    def element(batch: Any, position: Any, first: Any, second: Any) -> Any:
        value = operand.element(batch, position, first, second)
        conditions = []
        if shape[2] > extents[0]:
            conditions.append(first < extents[0])
        if shape[3] > extents[1]:
            # In units of whole vectors, so that the condition is plainly one for all elements of a vector.
            conditions.append(tirx.floordiv(second, lanes) < extents[1] // lanes)
        if conditions:
            value = tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, operand.dtype))
        return value

    attributes = {FETCH: lanes, DEPTH_FIRST: int(operand.contiguous_depth > operand.contiguous)}
    return te.compute(shape, element, name=name, attrs=attributes)


def _vector(contiguous: int) -> int:
    return next(lanes for lanes in VECTORS if contiguous % lanes == 0)


def _added_up(product: te.Tensor, slices: int) -> Product:
    def value(batch: Any, row: Any, column: Any) -> Any:
        total = product[0, batch, row, column]
        for part in range(1, slices):
            total = total + product[part, batch, row, column]
        return total

    return value


def _whole(extent: int, parts: int, unit: int) -> int:
    """The smallest multiple of ``unit`` of which ``parts`` cover ``extent``."""
    return -(-extent // (parts * unit)) * unit
