"""Attention in one kernel on tensor cores: both products use fragments of 16 x 16 x 16, all else is in float32.

    block of threads:  a tile of query rows (x batch), 16 for each warp, which stay in shared memory
      for each tile of keys:
        all threads load the keys; each warp multiplies its rows with them, and stores the scores in shared memory
        two lanes share a row: they find its new maximum and sum, and store the scores' exponentials there, rounded
        all threads load the values into the memory of the keys; each warp multiplies the exponentials with them,
        and its lanes add the products to those of the tiles before, scaled to the row's new maximum
      every lane divides its results by the row's sum

A warp has 16 rows, and thread x of it half a row: row x // 2, lane x % 2, columns in runs of 4.

    column     0 1 2 3   4 5 6 7   8 9 10 11   12 13 14 15   ...
    lane, run  0, 0      1, 0      0, 1        1, 1

The matrix of scores is never in memory. Sums are rescaled when a larger score comes (Milakov, Gimelshein: Online
normalizer calculation for softmax, 2018). The rows are divided among warps, so that warps need no data from each other
(Dao: FlashAttention-2, 2023). It is not defined which elements of a fragment a lane holds. So results go through shared
memory between the products and before they are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder, tirx as T
from tvm.sym.analyzer import Analyzer

from schedules.gpu.attention_tile import FRAGMENT_SHIFT, Attention, AttentionTile, whole_fragments
from schedules.gpu.tile import FRAGMENT, VECTORS, WARP
from schedules.relax_tools import ravel, unravel

LOWEST = -3.4028234663852886e38
"""The lowest float32, which is the maximum before the first score; with -inf the difference would be NaN."""
LANES_OF_ROW = 2
"""The number of lanes (threads of a warp) that share a row of scores."""
RUN = 4
"""The number of adjacent elements that one lane of a row takes, before those of the other lane."""

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
    operands: Operands,
    sizes: Attention,
    tile: AttentionTile,
    scale: float,
    dtype: str,
) -> te.Tensor:
    """Return ``softmax(query @ key^T * scale + mask) @ value``, [*outer, rows, value_width], in ``dtype``."""

    def body(inputs: Sequence[tirx.Buffer], outputs: Sequence[tirx.Buffer]) -> tirx.Stmt:
        return _Kernel(inputs, outputs[0], operands, sizes, tile, scale).body()

    shape = (*sizes.outer, sizes.rows, sizes.value_width)
    # These buffers start where their memory starts, like those of other kernels, so vectors are aligned.
    in_buffers = [tirx.decl_buffer(tensor.shape, tensor.dtype, tensor.op.name, layout=None) for tensor in tensors]
    out_buffer = tirx.decl_buffer(shape, dtype, "attention", layout=None)
    return te.extern([shape], list(tensors), body, name="attention", in_buffers=in_buffers, out_buffers=[out_buffer])


@dataclass(frozen=True)
class _Place:
    """A thread's row: ``row`` of the block's tile is query ``query`` of batch ``outer``; ``lane`` is 0 or 1 in it."""

    outer: list[Any]
    row: Any
    query: Any
    lane: Any

    def column(self, run: Any, place: Any) -> Any:
        """Return the column of element ``place`` of the thread's run number ``run``."""
        return (run * LANES_OF_ROW + self.lane) * RUN + place


@dataclass(frozen=True)
class _Softmax:
    """The buffers of the softmax.

    ``products`` and ``weights``, the rounded exponentials, have a tile of rows and keys in shared memory. ``scores``
    has a thread's part of its row, in float32. The others have one number of the row: the ``highest`` score and the
    ``total`` of the thread's exponentials so far, and the ``factor`` for what was added up before this tile.
    """

    products: tirx.Buffer
    weights: tirx.Buffer
    scores: tirx.Buffer
    highest: tirx.Buffer
    total: tirx.Buffer
    factor: tirx.Buffer


class _Kernel:
    """Emits the kernel; operands and exponentials have the tile's dtype."""

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
        pairs = zip(reads, inputs, strict=False)
        self.query, self.key, self.value, *mask = (partial(read, buffer) for read, buffer in pairs if read is not None)
        self.mask = mask[0] if mask else None

    def body(self) -> tirx.Stmt:
        sizes, tile = self.sizes, self.tile
        row_tiles = -(-sizes.rows // tile.rows)
        with (
            IRBuilder() as builder,
            T.thread_binding(prod(sizes.outer) * row_tiles, thread="blockIdx.x") as block,
            T.thread_binding(tile.warps, thread="threadIdx.y") as y,
            T.thread_binding(WARP, thread="threadIdx.x") as x,
            T.sblock("attention"),
        ):
            # Nothing is scheduled around this block, so its reads and writes need not be known.
            T.reads()
            T.writes()
            self._of_thread(unravel(block // row_tiles, sizes.outer), block % row_tiles * tile.rows, y, x)
        return builder.get()

    def _of_thread(self, outer: list[Any], first: Any, y: Any, x: Any) -> None:
        """Emit the work of thread (y, x) for the rows from ``first`` on."""
        sizes, tile, dtype = self.sizes, self.tile, self.tile.dtype
        width, value_width = whole_fragments(sizes.width), whole_fragments(sizes.value_width)
        key_row, value_row, score_row = (extent + FRAGMENT_SHIFT for extent in (width, value_width, tile.keys))
        thread, row = y * WARP + x, y * FRAGMENT + x // LANES_OF_ROW
        place = _Place(outer, row, first + row, x % LANES_OF_ROW)
        queries = T.alloc_buffer((tile.rows * key_row,), dtype, scope="shared")
        loaded = T.alloc_buffer((tile.loaded_elements(sizes),), dtype, scope="shared")
        products = T.alloc_buffer((tile.rows, score_row), "float32", scope="shared")
        weights = T.alloc_buffer((tile.rows, score_row), dtype, scope="shared")
        scores = T.alloc_buffer((tile.keys // LANES_OF_ROW,), "float32", scope="local")
        sums = T.alloc_buffer((value_width // LANES_OF_ROW,), "float32", scope="local")
        highest, total, scalar, factor = (T.alloc_buffer((1,), "float32", scope="local") for _ in range(4))
        softmax = _Softmax(products, weights, scores, highest, total, factor)
        of_keys = tile.keys // FRAGMENT
        left = _Fragments("wmma.matrix_a", dtype)
        keys, values = (_Fragments("wmma.matrix_b", dtype) for _ in range(2))
        results = _Fragments("wmma.accumulator", "float32", of_keys)

        # One scope in which all buffers are live, because TVM's reuse of memory confuses buffers of different dtypes.
        with T.attr(tirx.const(0, "int32"), "extern_scope", tirx.const(0, "int32")):
            self._load(thread, outer, self.query, tile.rows, first, sizes.rows, sizes.width, queries)
            T.buffer_store(highest, _number(LOWEST), [0])
            T.buffer_store(total, _number(0), [0])
            with T.unroll(value_width // LANES_OF_ROW) as c:
                T.buffer_store(sums, _number(0), [c])
            with T.serial(self._key_tiles(first)) as step:
                start = step * tile.keys
                self._load(thread, outer, self.key, tile.keys, start, sizes.keys, sizes.width, loaded)
                for j in range(of_keys):
                    results.clear(j)
                with T.unroll(width // FRAGMENT) as k:
                    left.load(queries, (y * FRAGMENT) * key_row + k * FRAGMENT, key_row)
                    for j in range(of_keys):
                        keys.load(loaded, j * FRAGMENT * key_row + k * FRAGMENT, key_row, "col_major")
                        results.add_product(j, left, keys)
                for j in range(of_keys):
                    results.store(j, products, y * FRAGMENT * score_row + j * FRAGMENT, score_row)
                self._exponentials(place, start, softmax)
                self._load(thread, outer, self.value, tile.keys, start, sizes.keys, sizes.value_width, loaded)
                # Take as many columns at a time as there are keys; they fit where the scores were.
                for column in range(0, value_width, tile.keys):
                    fragments = min(of_keys, (value_width - column) // FRAGMENT)
                    for c in range(fragments):
                        results.clear(c)
                    for j in range(of_keys):
                        left.load(weights, y * FRAGMENT * score_row + j * FRAGMENT, score_row)
                        for c in range(fragments):
                            values.load(loaded, j * FRAGMENT * value_row + column + c * FRAGMENT, value_row)
                            results.add_product(c, left, values)
                    for c in range(fragments):
                        results.store(c, products, y * FRAGMENT * score_row + c * FRAGMENT, score_row)
                    with T.unroll(fragments * FRAGMENT // LANES_OF_ROW // RUN) as run, T.vectorized(RUN) as n:
                        at = column // LANES_OF_ROW + run * RUN + n
                        added = products[row, place.column(run, n)]
                        T.buffer_store(sums, sums[at] * factor[0] + added, [at])
            T.buffer_store(scalar, total[0], [0])
            _of_row(scalar, lambda a, b: a + b)
            self._store(place, sums, scalar)

    def _key_tiles(self, first: Any) -> Any:
        """Return the number of tiles of keys that have a weight for any row of the tile from ``first`` on."""
        sizes, tile = self.sizes, self.tile
        all_tiles = -(-sizes.keys // tile.keys)
        if sizes.reach is None:
            return all_tiles
        return tirx.min(all_tiles, (first + (tile.rows + sizes.reach + tile.keys - 1)) // tile.keys)

    def _load(
        self,
        thread: Any,
        outer: list[Any],
        read: Callable[[Any], Any],
        rows: int,
        first: Any,
        existing: int,
        width: int,
        loaded: tirx.Buffer,
    ) -> None:
        """Load whole fragments of rows from ``first`` on, with all threads, neighbours along the columns.

        There are zeros beyond the ``existing`` rows and their ``width``. Each thread loads several columns at a time.
        """
        columns, dtype = whole_fragments(width), self.tile.dtype

        def element(row: Any, column: Any) -> Any:
            return read((*outer, first + row, column))

        lanes = _side_by_side(element, width)
        groups = columns // lanes
        with T.serial(-(-rows * groups // self.tile.threads)) as step:
            place = step * self.tile.threads + thread
            row, group = place // groups, place % groups
            # Count in whole vectors, so that the condition is the same for all elements of a vector.
            exists = tirx.all(row < existing - first, group < width // lanes)

            def take() -> None:
                with T.vectorized(lanes) if lanes > 1 else nullcontext(0) as lane:
                    column = group * lanes + lane
                    value = tirx.if_then_else(exists, element(row, column).astype(dtype), tirx.const(0, dtype))
                    T.buffer_store(loaded, value, [row * (columns + FRAGMENT_SHIFT) + column])

            if rows * groups % self.tile.threads == 0:
                take()
            else:
                with T.If(place < rows * groups), T.Then():
                    take()

    def _score(self, product: Any, place: _Place, key: Any) -> Any:
        score = product * _number(self.scale)
        if self.mask is not None:
            inside = tirx.all(place.query < self.sizes.rows, key < self.sizes.keys)
            added = self.mask((*place.outer, place.query, key)).astype("float32")
            score = score + tirx.if_then_else(inside, added, _number(0))
        if self.sizes.keys % self.tile.keys == 0:
            return score
        return tirx.Select(key < self.sizes.keys, score, _number(float("-inf")))

    def _exponentials(self, place: _Place, start: Any, softmax: _Softmax) -> None:
        """Compute the exponentials of a row's scores for keys from ``start`` on, its new maximum, total and factor."""
        scores, highest, total, factor = softmax.scores, softmax.highest, softmax.total, softmax.factor
        runs = self.tile.keys // LANES_OF_ROW // RUN
        T.buffer_store(factor, highest[0], [0])
        with T.unroll(runs) as run:
            with T.vectorized(RUN) as n:
                T.buffer_store(scores, softmax.products[place.row, place.column(run, n)], [run * RUN + n])
            with T.unroll(RUN) as n:
                score = self._score(scores[run * RUN + n], place, start + place.column(run, n))
                T.buffer_store(scores, score, [run * RUN + n])
                T.buffer_store(highest, tirx.max(highest[0], scores[run * RUN + n]), [0])
        _of_row(highest, tirx.max)
        T.buffer_store(factor, tirx.exp(factor[0] - highest[0]), [0])
        T.buffer_store(total, total[0] * factor[0], [0])
        with T.unroll(runs) as run:
            with T.unroll(RUN) as n:
                T.buffer_store(scores, tirx.exp(scores[run * RUN + n] - highest[0]), [run * RUN + n])
                T.buffer_store(total, total[0] + scores[run * RUN + n], [0])
            with T.vectorized(RUN) as n:
                rounded = scores[run * RUN + n].astype(self.tile.dtype)
                T.buffer_store(softmax.weights, rounded, [place.row, place.column(run, n)])

    def _store(self, place: _Place, sums: tirx.Buffer, total: tirx.Buffer) -> None:
        width = self.sizes.value_width
        lanes = RUN if width % RUN == 0 else 1
        with (
            T.If(place.query < self.sizes.rows),
            T.Then(),
            T.unroll(-(-width // RUN // LANES_OF_ROW)) as run,
            T.unroll(RUN // lanes) as group,
        ):
            column = place.column(run, group * lanes)
            with T.If(column < width), T.Then(), T.vectorized(lanes) if lanes > 1 else nullcontext(0) as n:
                result = (sums[run * RUN + group * lanes + n] / total[0]).astype(str(self.output.dtype))
                T.buffer_store(self.output, result, [*place.outer, place.query, column + n])


class _Fragments:
    """An array of fragments and the instructions on it."""

    def __init__(self, scope: str, dtype: str, count: int = 1) -> None:
        self.buffer = T.alloc_buffer((count * FRAGMENT * FRAGMENT,), dtype, scope=scope)

    def clear(self, index: int) -> None:
        T.evaluate(T.tvm_fill_fragment(self.buffer.data, *_SIZE, index, _number(0)))

    def load(self, source: tirx.Buffer, offset: Any, row: int, layout: str = "row_major") -> None:
        """Load a fragment from a matrix whose rows (columns, if ``col_major``) are ``row`` elements apart."""
        pointer = source.access_ptr("r", offset=offset, extent=row * (FRAGMENT - 1) + FRAGMENT)
        T.evaluate(T.tvm_load_matrix_sync(self.buffer.data, *_SIZE, 0, pointer, row, layout))

    def store(self, index: int, result: tirx.Buffer, offset: Any, row: int) -> None:
        pointer = result.access_ptr("w", offset=offset, extent=row * (FRAGMENT - 1) + FRAGMENT)
        T.evaluate(T.tvm_store_matrix_sync(self.buffer.data, *_SIZE, index, pointer, row, "row_major"))

    def add_product(self, index: int, left: _Fragments, right: _Fragments) -> None:
        accumulator = self.buffer.data, index
        T.evaluate(T.tvm_mma_sync(*accumulator, left.buffer.data, 0, right.buffer.data, 0, *accumulator))


_SIZE = (FRAGMENT, FRAGMENT, FRAGMENT)


def _side_by_side(read: Callable[[Any, Any], Any], columns: int) -> int:
    """Return how many elements of a row one load may take: they are contiguous, and the first is aligned."""
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


def _number(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


def _of_row(scalar: tirx.Buffer, combine: Callable[[Any, Any], Any]) -> None:
    """Combine ``scalar[0]`` over the two lanes of a row, which are neighbours; both get the result."""
    exchanged = T.tvm_warp_shuffle_xor(tirx.const(0xFFFFFFFF, "uint32"), scalar[0], 1, LANES_OF_ROW, WARP)
    T.buffer_store(scalar, combine(scalar[0], exchanged), [0])
