"""Attention in one kernel: scores, softmax and the product with the values, tile by tile of the keys.

    block of threads:  a tile of query rows (x batch), which stay in shared memory
      for each tile of keys:
        all threads load the keys, and each multiplies its rows with its keys
        sums are scaled to the rows' new maxima; the scores' exponentials go to shared memory
        all threads load the values into the memory of the keys, and each adds to its part of the product
      every thread divides its results by the rows' sums

No matrix of scores is in memory. Sums are scaled when a larger score comes (Milakov, Gimelshein: Online normalizer
calculation for softmax, 2018; Dao and others: FlashAttention, 2022). All is computed in float32, in one order.

The threads that have a row in common are neighbours in one warp, and find its maximum by shuffles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder, tirx as T

from tvm_split.schedules.expressions import unravel
from tvm_split.schedules.gpu.attention_tile import ROW_THREADS, SHIFT, Attention, AttentionTile

LOWEST = -3.4028234663852886e38
"""The lowest of float32, as the maximum of no scores: -inf less itself would be NaN."""

Read = Callable[[Any, Sequence[Any]], Any]
"""An element of what an operand is a view of, at the operand's indices [*outer, row, column]."""


@dataclass(frozen=True)
class Operands:
    """How queries [*outer, rows, width], keys [*outer, keys, width], values and what is added to scores are read."""

    query: Read
    key: Read
    value: Read
    mask: Read | None


def attention(
    *tensors: te.Tensor, operands: Operands, sizes: Attention, tile: AttentionTile, scale: float, dtype: str
) -> te.Tensor:
    """``softmax(query @ key^T * scale + mask) @ value``, [*outer, rows, value_width], in ``dtype``."""

    def body(inputs: Sequence[tirx.Buffer], outputs: Sequence[tirx.Buffer]) -> tirx.Stmt:
        return _Kernel(inputs, outputs[0], operands, sizes, tile, scale).body()

    shape = (*sizes.outer, sizes.rows, sizes.value_width)
    return te.extern([shape], list(tensors), body, name="attention", dtype=[dtype])


class _Kernel:
    def __init__(
        self,
        inputs: Sequence[tirx.Buffer],
        output: tirx.Buffer,
        operands: Operands,
        sizes: Attention,
        tile: AttentionTile,
        scale: float,
    ) -> None:
        self.output, self.sizes, self.tile, self.scale = output, sizes, tile, scale
        reads = (operands.query, operands.key, operands.value, operands.mask)
        given = zip(reads, inputs, strict=False)
        self.query, self.key, self.value, *mask = (partial(read, buffer) for read, buffer in given if read is not None)
        self.mask = mask[0] if mask else None

    def body(self) -> tirx.Stmt:
        sizes, tile = self.sizes, self.tile
        row_tiles = -(-sizes.rows // tile.rows)
        with (
            IRBuilder() as builder,
            T.thread_binding(prod(sizes.outer) * row_tiles, thread="blockIdx.x") as block,
            T.thread_binding(tile.rows // tile.row_registers, thread="threadIdx.y") as y,
            T.thread_binding(ROW_THREADS, thread="threadIdx.x") as x,
            T.sblock("attention"),
        ):
            # Nothing is scheduled around this block, which would need to know.
            T.reads()
            T.writes()
            self._of_thread(unravel(block // row_tiles, sizes.outer), block % row_tiles * tile.rows, y, x)
        return builder.get()

    def _of_thread(self, outer: list[Any], first: Any, y: Any, x: Any) -> None:
        sizes, tile = self.sizes, self.tile
        rows, keys, columns = tile.row_registers, tile.key_columns, sizes.value_columns
        self.thread = y * ROW_THREADS + x
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

        self._load(
            tile.rows, sizes.width, sizes.width, sizes.rows - first,
            lambda row, k: self.query((*outer, first + row, k)),
            lambda row, k, value: T.buffer_store(queries, value, [k, row]),
        )  # fmt: skip
        with T.unroll(rows) as i:
            T.buffer_store(highest, _float(LOWEST), [i])
            T.buffer_store(totals, _float(0), [i])
            with T.unroll(columns) as c:
                T.buffer_store(sums, _float(0), [i * columns + c])
        with T.serial(-(-sizes.keys // tile.keys)) as step:
            start = step * tile.keys
            self._load(
                tile.keys, sizes.width, sizes.width, sizes.keys - start,
                lambda key, k: self.key((*outer, start + key, k)),
                lambda key, k, value: T.buffer_store(loaded, value, [k * (tile.keys + SHIFT) + key]),
            )  # fmt: skip
            with T.unroll(rows * keys) as i:
                T.buffer_store(scores, _float(0), [i])
            with T.serial(sizes.width) as k:
                _copy(rows, lambda i: queries[k, y * rows + i], left)
                _copy(keys, lambda j: loaded[k * (tile.keys + SHIFT) + x * keys + j], right)
                with T.unroll(rows) as i, T.unroll(keys) as j:
                    T.buffer_store(scores, scores[i * keys + j] + left[i] * right[j], [i * keys + j])
            with T.unroll(rows) as i:
                with T.unroll(keys) as j:
                    score = self._score(scores[i * keys + j], outer, first + y * rows + i, start + x * keys + j)
                    T.buffer_store(scores, score, [i * keys + j])
                T.buffer_store(scalar, highest[i], [0])
                with T.unroll(keys) as j:
                    T.buffer_store(scalar, tirx.max(scalar[0], scores[i * keys + j]), [0])
                _of_row(scalar, tirx.max)
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
            self._load(
                tile.keys, width, sizes.value_width, sizes.keys - start,
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
            _of_row(scalar, lambda a, b: a + b)
            with T.unroll(columns) as c:
                row, column = first + y * rows + i, x * columns + c
                with T.If(tirx.all(row < sizes.rows, column < sizes.value_width)), T.Then():
                    result = (sums[i * columns + c] / scalar[0]).astype(str(self.output.dtype))
                    T.buffer_store(self.output, result, [*outer, row, column])

    def _load(
        self,
        rows: int,
        columns: int,
        existing_columns: int,
        existing_rows: Any,
        read: Callable[[Any, Any], Any],
        store: Callable[[Any, Any, Any], None],
    ) -> None:
        """A matrix, by all threads, neighbours along its columns; zeros where there are no rows and columns."""
        with T.serial(-(-rows * columns // self.tile.threads)) as step:
            place = step * self.tile.threads + self.thread
            row, column = place // columns, place % columns
            exists = tirx.all(row < existing_rows, column < existing_columns)
            value = tirx.if_then_else(exists, read(row, column).astype("float32"), _float(0))
            if rows * columns % self.tile.threads == 0:
                store(row, column, value)
            else:
                with T.If(place < rows * columns), T.Then():
                    store(row, column, value)

    def _score(self, product: Any, outer: list[Any], row: Any, key: Any) -> Any:
        score = product * _float(self.scale)
        if self.mask is not None:
            inside = tirx.all(row < self.sizes.rows, key < self.sizes.keys)
            added = self.mask((*outer, row, key)).astype("float32")
            score = score + tirx.if_then_else(inside, added, _float(0))
        if self.sizes.keys % self.tile.keys == 0:
            return score
        return tirx.Select(key < self.sizes.keys, score, _float(float("-inf")))


def _float(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


def _lanes(count: int) -> Any:
    """A loop over elements that lie side by side, in shared memory and in registers."""
    return T.vectorized(count) if count in (2, 4) else T.unroll(count)


def _copy(count: int, read: Callable[[Any], Any], registers: tirx.Buffer) -> None:
    if count > 4 and count % 4 == 0:
        with T.unroll(count // 4) as group, T.vectorized(4) as lane:
            T.buffer_store(registers, read(group * 4 + lane), [group * 4 + lane])
    else:
        with _lanes(count) as lane:
            T.buffer_store(registers, read(lane), [lane])


def _of_row(scalar: tirx.Buffer, combine: Callable[[Any, Any], Any]) -> None:
    """What the threads of a row have in ``scalar[0]``, combined by all of them."""
    for distance in (8, 4, 2, 1):
        other = T.tvm_warp_shuffle_xor(
            tirx.const(0xFFFFFFFF, "uint32"), scalar[0], distance, ROW_THREADS, 2 * ROW_THREADS
        )
        T.buffer_store(scalar, combine(scalar[0], other), [0])
