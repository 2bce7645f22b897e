"""Attention in one kernel: scores, softmax and the product with the values, for one tile of keys at a time.

    block of threads:  a tile of query rows (x batch), which stay in shared memory
      for each tile of keys:
        all threads load the keys, and each multiplies its rows with its keys
        sums are scaled to the rows' new maxima; the scores' exponentials go to shared memory
        all threads load the values into the memory of the keys, and each adds to its part of the product
      every thread divides its results by the rows' sums

The matrix of scores is never in memory. Sums are rescaled when a larger score comes (Milakov, Gimelshein: Online
normalizer calculation for softmax, 2018; Dao and others: FlashAttention, 2022). Everything is computed in float32, in a
fixed order. The threads that share a row are neighbours in one warp and find its maximum by shuffles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, TypeVar

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder, tirx as T
from tvm.sym.analyzer import Analyzer

from schedules.gpu.attention_tile import ROW_THREADS, SHIFT, AnyAttentionTile, Attention, AttentionTile
from schedules.gpu.tile import VECTORS, WARP
from schedules.relax_tools import ravel, unravel

LOWEST = -3.4028234663852886e38
"""The lowest float32, which is the maximum before the first score; with -inf the difference would be NaN."""

AnyTile = TypeVar("AnyTile", bound=AnyAttentionTile)
Read = Callable[[Any, Sequence[Any]], Any]
"""Reads an operand's element from the tensor it is a view of, at the operand's indices [*outer, row, column]."""


@dataclass(frozen=True)
class Operands:
    """Functions that read the operands and the mask.

    Queries are [*outer, rows, width], keys [*outer, keys, width], values [*outer, keys, value_width]. The mask is added
    to the scores.
    """

    query: Read
    key: Read
    value: Read
    mask: Read | None


def attention(
    *tensors: te.Tensor,
    kernel: type[AnyKernel[Any]],
    operands: Operands,
    sizes: Attention,
    tile: AnyAttentionTile,
    scale: float,
    dtype: str,
) -> te.Tensor:
    """``softmax(query @ key^T * scale + mask) @ value``, [*outer, rows, value_width], in ``dtype``."""

    def body(inputs: Sequence[tirx.Buffer], outputs: Sequence[tirx.Buffer]) -> tirx.Stmt:
        return kernel(inputs, outputs[0], operands, sizes, tile, scale).body()

    shape = (*sizes.outer, sizes.rows, sizes.value_width)
    # These buffers start where their memory starts, like those of other kernels, so vectors are aligned.
    in_buffers = [tirx.decl_buffer(tensor.shape, tensor.dtype, tensor.op.name, layout=None) for tensor in tensors]
    out_buffer = tirx.decl_buffer(shape, dtype, "attention", layout=None)
    return te.extern([shape], list(tensors), body, name="attention", in_buffers=in_buffers, out_buffers=[out_buffer])


class AnyKernel(ABC, Generic[AnyTile]):
    """The common part of the attention kernels: blocks of threads, loads and masks."""

    def __init__(
        self,
        inputs: Sequence[tirx.Buffer],
        output: tirx.Buffer,
        operands: Operands,
        sizes: Attention,
        tile: AnyTile,
        scale: float,
    ) -> None:
        self.output, self.sizes, self.tile, self.scale = output, sizes, tile, scale
        reads = (operands.query, operands.key, operands.value, operands.mask)
        pairs = zip(reads, inputs, strict=False)
        self.query, self.key, self.value, *mask = (partial(read, buffer) for read, buffer in pairs if read is not None)
        self.mask = mask[0] if mask else None

    def body(self) -> tirx.Stmt:
        sizes, tile = self.sizes, self.tile
        row_tiles = -(-sizes.rows // tile.rows)
        with (
            IRBuilder() as builder,
            T.thread_binding(prod(sizes.outer) * row_tiles, thread="blockIdx.x") as block,
            T.thread_binding(tile.threads // self.neighbours, thread="threadIdx.y") as y,
            T.thread_binding(self.neighbours, thread="threadIdx.x") as x,
            T.sblock("attention"),
        ):
            # Nothing is scheduled around this block, so its reads and writes need not be known.
            T.reads()
            T.writes()
            self.of_thread(unravel(block // row_tiles, sizes.outer), block % row_tiles * tile.rows, y, x)
        return builder.get()

    @property
    @abstractmethod
    def neighbours(self) -> int:
        """The number of threads along threadIdx.x: a part of one warp."""

    @abstractmethod
    def of_thread(self, outer: list[Any], first: Any, y: Any, x: Any) -> None:
        """Emit the work of thread (y, x) for the rows from ``first`` on."""

    def key_tiles(self, first: Any) -> Any:
        """The number of tiles of keys for which the rows from ``first`` on have weights."""
        sizes, tile = self.sizes, self.tile
        all_tiles = -(-sizes.keys // tile.keys)
        if sizes.reach is None:
            return all_tiles
        return tirx.min(all_tiles, (first + (tile.rows + sizes.reach + tile.keys - 1)) // tile.keys)

    def load(
        self,
        thread: Any,
        rows: int,
        columns: int,
        existing_columns: int,
        existing_rows: Any,
        read: Callable[[Any, Any], Any],
        store: Callable[[Any, Any, Any], None],
        dtype: str = "float32",
        lanes: int = 1,
    ) -> None:
        """Load a matrix with all threads, neighbours along its columns; missing rows and columns become zeros.

        Each thread loads ``lanes`` columns at a time.
        """
        groups = columns // lanes
        with T.serial(-(-rows * groups // self.tile.threads)) as step:
            place = step * self.tile.threads + thread
            row, group = place // groups, place % groups
            # Count in whole vectors, so that the condition is the same for all elements of a vector.
            exists = tirx.all(row < existing_rows, group < existing_columns // lanes)

            def take() -> None:
                with T.vectorized(lanes) if lanes > 1 else nullcontext(0) as lane:
                    column = group * lanes + lane
                    value = tirx.if_then_else(exists, read(row, column).astype(dtype), tirx.const(0, dtype))
                    store(row, column, value)

            if rows * groups % self.tile.threads == 0:
                take()
            else:
                with T.If(place < rows * groups), T.Then():
                    take()

    def score(self, product: Any, outer: list[Any], row: Any, key: Any) -> Any:
        score = product * number(self.scale)
        if self.mask is not None:
            inside = tirx.all(row < self.sizes.rows, key < self.sizes.keys)
            added = self.mask((*outer, row, key)).astype("float32")
            score = score + tirx.if_then_else(inside, added, number(0))
        if self.sizes.keys % self.tile.keys == 0:
            return score
        return tirx.Select(key < self.sizes.keys, score, number(float("-inf")))


class Kernel(AnyKernel[AttentionTile]):
    """The kernel in float32."""

    @property
    def neighbours(self) -> int:
        return ROW_THREADS

    def of_thread(self, outer: list[Any], first: Any, y: Any, x: Any) -> None:
        sizes, tile = self.sizes, self.tile
        rows, keys, columns = tile.row_registers, tile.key_columns, sizes.value_columns
        thread = y * ROW_THREADS + x
        queries = T.alloc_buffer((sizes.width, tile.rows + SHIFT), "float32", scope="shared")
        loaded = T.alloc_buffer((tile.loaded_elements(sizes),), "float32", scope="shared")
        exponentials = T.alloc_buffer((tile.rows, tile.keys + SHIFT), "float32", scope="shared")
        scores = T.alloc_buffer((rows * keys,), "float32", scope="local")
        sums = T.alloc_buffer((rows * columns,), "float32", scope="local")
        highest = T.alloc_buffer((rows,), "float32", scope="local")
        totals = T.alloc_buffer((rows,), "float32", scope="local")
        left = T.alloc_buffer((rows * 4,), "float32", scope="local")
        right = T.alloc_buffer((max(keys, columns),), "float32", scope="local")
        scalar = T.alloc_buffer((2,), "float32", scope="local")

        self.load(
            thread, tile.rows, sizes.width, sizes.width, sizes.rows - first,
            lambda row, k: self.query((*outer, first + row, k)),
            lambda row, k, value: T.buffer_store(queries, value, [k, row]),
        )  # fmt: skip
        with T.unroll(rows) as i:
            T.buffer_store(highest, number(LOWEST), [i])
            T.buffer_store(totals, number(0), [i])
            with T.unroll(columns) as c:
                T.buffer_store(sums, number(0), [i * columns + c])
        with T.serial(self.key_tiles(first)) as step:
            start = step * tile.keys
            self.load(
                thread, tile.keys, sizes.width, sizes.width, sizes.keys - start,
                lambda key, k: self.key((*outer, start + key, k)),
                lambda key, k, value: T.buffer_store(loaded, value, [k * (tile.keys + SHIFT) + key]),
            )  # fmt: skip
            with T.unroll(rows * keys) as i:
                T.buffer_store(scores, number(0), [i])
            with T.serial(sizes.width) as k:
                _copy(rows, lambda i: queries[k, y * rows + i], left)
                _copy(keys, lambda j: loaded[k * (tile.keys + SHIFT) + x * keys + j], right)
                with T.unroll(rows) as i, T.unroll(keys) as j:
                    T.buffer_store(scores, scores[i * keys + j] + left[i] * right[j], [i * keys + j])
            with T.unroll(rows) as i:
                with T.unroll(keys) as j:
                    score = self.score(scores[i * keys + j], outer, first + y * rows + i, start + x * keys + j)
                    T.buffer_store(scores, score, [i * keys + j])
                T.buffer_store(scalar, highest[i], [0])
                with T.unroll(keys) as j:
                    T.buffer_store(scalar, tirx.max(scalar[0], scores[i * keys + j]), [0])
                of_row(scalar, tirx.max, ROW_THREADS)
                T.buffer_store(scalar, tirx.exp(highest[i] - scalar[0]), [1])
                T.buffer_store(highest, scalar[0], [i])
                T.buffer_store(totals, totals[i] * scalar[1], [i])
                with T.unroll(columns) as c:
                    T.buffer_store(sums, sums[i * columns + c] * scalar[1], [i * columns + c])
                with T.unroll(keys) as j:
                    T.buffer_store(scores, tirx.exp(scores[i * keys + j] - highest[i]), [i * keys + j])
                    T.buffer_store(totals, totals[i] + scores[i * keys + j], [i])
                with _lanes(keys) as j:
                    T.buffer_store(exponentials, scores[i * keys + j], [y * rows + i, x * keys + j])
            width = ROW_THREADS * columns
            self.load(
                thread, tile.keys, width, sizes.value_width, sizes.keys - start,
                lambda key, c: self.value((*outer, start + key, c)),
                lambda key, c, value: T.buffer_store(loaded, value, [key * width + c]),
            )  # fmt: skip
            with T.serial(tile.keys // 4) as group:
                with T.unroll(rows) as i, T.vectorized(4) as n:
                    T.buffer_store(left, exponentials[y * rows + i, group * 4 + n], [i * 4 + n])
                with T.unroll(4) as n:
                    _copy(columns, lambda c: loaded[(group * 4 + n) * width + x * columns + c], right)
                    with T.unroll(rows) as i, T.unroll(columns) as c:
                        at = i * columns + c
                        T.buffer_store(sums, sums[at] + left[i * 4 + n] * right[c], [at])
        with T.unroll(rows) as i:
            T.buffer_store(scalar, totals[i], [0])
            of_row(scalar, lambda a, b: a + b, ROW_THREADS)
            with T.unroll(columns) as c:
                row, column = first + y * rows + i, x * columns + c
                with T.If(tirx.all(row < sizes.rows, column < sizes.value_width)), T.Then():
                    result = (sums[i * columns + c] / scalar[0]).astype(str(self.output.dtype))
                    T.buffer_store(self.output, result, [*outer, row, column])


def side_by_side(read: Callable[[Any, Any], Any], columns: int) -> int:
    """The number of elements of a row that one load may take: they are contiguous, and the first is aligned to them."""
    row, group = tirx.Var("row", "int64"), tirx.Var("group", "int64")
    analyzer = Analyzer()

    def place(column: Any) -> Any:
        load = read(row, column)
        return ravel(load.indices, [int(extent) for extent in load.source.shape])

    for lanes in VECTORS:
        first = place(group * lanes)
        steps = [analyzer.simplify(place(group * lanes + lane) - first) for lane in range(1, lanes)]
        aligned = analyzer.modular_set(analyzer.simplify(first))
        if (
            columns % lanes == 0
            and all(isinstance(step, tirx.IntImm) and int(step) == lane for lane, step in enumerate(steps, 1))
            and aligned.coeff % lanes == 0
            and aligned.base % lanes == 0
        ):
            return lanes
    return 1


def number(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


def _lanes(count: int) -> Any:
    """A loop over elements that are contiguous in shared memory and in registers."""
    return T.vectorized(count) if count in (2, 4) else T.unroll(count)


def _copy(count: int, read: Callable[[Any], Any], registers: tirx.Buffer) -> None:
    if count > 4 and count % 4 == 0:
        with T.unroll(count // 4) as group, T.vectorized(4) as lane:
            T.buffer_store(registers, read(group * 4 + lane), [group * 4 + lane])
    else:
        with _lanes(count) as lane:
            T.buffer_store(registers, read(lane), [lane])


def of_row(scalar: tirx.Buffer, combine: Callable[[Any, Any], Any], threads: int) -> None:
    """Combine ``scalar[0]`` over the ``threads`` of a row, neighbours in one warp; all of them get the result."""
    distance = threads // 2
    while distance:
        exchanged = T.tvm_warp_shuffle_xor(tirx.const(0xFFFFFFFF, "uint32"), scalar[0], distance, threads, WARP)
        T.buffer_store(scalar, combine(scalar[0], exchanged), [0])
        distance //= 2
