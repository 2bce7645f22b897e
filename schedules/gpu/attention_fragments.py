"""Attention in one kernel on tensor cores: both products use fragments of 16 x 16 x 16, all else is in float32.

    block of threads:  a tile of query rows (x batch), 16 for each warp, which stay in shared memory
      for each tile of keys:
        all threads load the keys; each warp multiplies its rows with them, and stores the scores in shared memory
        two lanes share a row: they find its new maximum and sum, and store the scores' exponentials there, rounded
        all threads load the values into the memory of the keys; each warp multiplies the exponentials with them,
        and its lanes add the products to those of the tiles before, scaled to the row's new maximum
      every lane divides its results by the row's sum

This is the online softmax of `attention_kernel`, with the rows divided among warps, so that warps need no data from
each other (Dao: FlashAttention-2, 2023). It is not defined which elements of a fragment a lane holds. So results go
through shared memory between the products and before they are scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.attention_kernel import LOWEST, AnyKernel, number, of_row, side_by_side
from schedules.gpu.attention_tile import FRAGMENT_SHIFT, AttentionFragments, whole_fragments
from schedules.gpu.tile import FRAGMENT, WARP

LANES_OF_ROW = 2
RUN = 4
"""The number of adjacent elements that one lane of a row takes, before those of the other lane."""


class FragmentKernel(AnyKernel[AttentionFragments]):
    """The kernel on tensor cores; operands and exponentials have the tile's dtype."""

    @property
    def neighbours(self) -> int:
        return WARP

    def of_thread(self, outer: list[Any], first: Any, y: Any, x: Any) -> None:
        sizes, tile, dtype = self.sizes, self.tile, self.tile.dtype
        width, value_width = whole_fragments(sizes.width), whole_fragments(sizes.value_width)
        key_row, value_row, score_row = (extent + FRAGMENT_SHIFT for extent in (width, value_width, tile.keys))
        thread, row, lane = y * WARP + x, y * FRAGMENT + x // LANES_OF_ROW, x % LANES_OF_ROW
        queries = T.alloc_buffer((tile.rows * key_row,), dtype, scope="shared")
        loaded = T.alloc_buffer((tile.loaded_elements(sizes),), dtype, scope="shared")
        products = T.alloc_buffer((tile.rows, score_row), "float32", scope="shared")
        weights = T.alloc_buffer((tile.rows, score_row), dtype, scope="shared")
        row_scores = T.alloc_buffer((tile.keys // LANES_OF_ROW,), "float32", scope="local")
        sums = T.alloc_buffer((value_width // LANES_OF_ROW,), "float32", scope="local")
        highest, total, scalar, factor = (T.alloc_buffer((1,), "float32", scope="local") for _ in range(4))
        of_keys = tile.keys // FRAGMENT
        left = _Fragments("wmma.matrix_a", dtype)
        keys, values = (_Fragments("wmma.matrix_b", dtype) for _ in range(2))
        results = _Fragments("wmma.accumulator", "float32", of_keys)

        # One scope in which all buffers are live, because TVM's reuse of memory confuses buffers of different dtypes.
        with T.attr(tirx.const(0, "int32"), "extern_scope", tirx.const(0, "int32")):
            self._load_whole(thread, outer, self.query, tile.rows, first, sizes.rows, sizes.width, queries)
            T.buffer_store(highest, number(LOWEST), [0])
            T.buffer_store(total, number(0), [0])
            with T.unroll(value_width // LANES_OF_ROW) as c:
                T.buffer_store(sums, number(0), [c])
            with T.serial(self.key_tiles(first)) as step:
                start = step * tile.keys
                self._load_whole(thread, outer, self.key, tile.keys, start, sizes.keys, sizes.width, loaded)
                for j in range(of_keys):
                    results.clear(j)
                with T.unroll(width // FRAGMENT) as k:
                    left.load(queries, (y * FRAGMENT) * key_row + k * FRAGMENT, key_row)
                    for j in range(of_keys):
                        keys.load(loaded, j * FRAGMENT * key_row + k * FRAGMENT, key_row, "col_major")
                        results.add_product(j, left, keys)
                for j in range(of_keys):
                    results.store(j, products, y * FRAGMENT * score_row + j * FRAGMENT, score_row)
                self._exponentials(
                    outer, first + row, row, start, lane, products, weights, row_scores, highest, total, factor
                )
                self._load_whole(thread, outer, self.value, tile.keys, start, sizes.keys, sizes.value_width, loaded)
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
                        added = products[row, (run * LANES_OF_ROW + lane) * RUN + n]
                        T.buffer_store(sums, sums[at] * factor[0] + added, [at])
            T.buffer_store(scalar, total[0], [0])
            of_row(scalar, lambda a, b: a + b, LANES_OF_ROW)
            self._store(outer, first + row, lane, sums, scalar)

    def _load_whole(
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
        """Load whole fragments of rows from ``first`` on; zeros beyond the ``existing`` rows and their ``width``."""
        columns = whole_fragments(width)

        def element(row: Any, column: Any) -> Any:
            return read((*outer, first + row, column))

        def store(row: Any, column: Any, value: Any) -> None:
            T.buffer_store(loaded, value, [row * (columns + FRAGMENT_SHIFT) + column])

        lanes = side_by_side(element, width)
        self.load(thread, rows, columns, width, existing - first, element, store, self.tile.dtype, lanes)

    def _exponentials(
        self,
        outer: list[Any],
        query: Any,
        row: Any,
        start: Any,
        lane: Any,
        products: tirx.Buffer,
        weights: tirx.Buffer,
        row_scores: tirx.Buffer,
        highest: tirx.Buffer,
        total: tirx.Buffer,
        factor: tirx.Buffer,
    ) -> None:
        """Compute the exponentials of a row's scores and its new maximum; ``factor`` rescales the sums so far."""
        runs = self.tile.keys // LANES_OF_ROW // RUN
        T.buffer_store(factor, highest[0], [0])
        with T.unroll(runs) as run:
            with T.vectorized(RUN) as n:
                T.buffer_store(row_scores, products[row, (run * LANES_OF_ROW + lane) * RUN + n], [run * RUN + n])
            with T.unroll(RUN) as n:
                key = start + (run * LANES_OF_ROW + lane) * RUN + n
                T.buffer_store(row_scores, self.score(row_scores[run * RUN + n], outer, query, key), [run * RUN + n])
                T.buffer_store(highest, tirx.max(highest[0], row_scores[run * RUN + n]), [0])
        of_row(highest, tirx.max, LANES_OF_ROW)
        T.buffer_store(factor, tirx.exp(factor[0] - highest[0]), [0])
        T.buffer_store(total, total[0] * factor[0], [0])
        with T.unroll(runs) as run:
            with T.unroll(RUN) as n:
                T.buffer_store(row_scores, tirx.exp(row_scores[run * RUN + n] - highest[0]), [run * RUN + n])
                T.buffer_store(total, total[0] + row_scores[run * RUN + n], [0])
            with T.vectorized(RUN) as n:
                rounded = row_scores[run * RUN + n].astype(self.tile.dtype)
                T.buffer_store(weights, rounded, [row, (run * LANES_OF_ROW + lane) * RUN + n])

    def _store(self, outer: list[Any], query: Any, lane: Any, sums: tirx.Buffer, total: tirx.Buffer) -> None:
        width = self.sizes.value_width
        lanes = RUN if width % RUN == 0 else 1
        with (
            T.If(query < self.sizes.rows),
            T.Then(),
            T.unroll(-(-width // RUN // LANES_OF_ROW)) as run,
            T.unroll(RUN // lanes) as group,
        ):
            column = (run * LANES_OF_ROW + lane) * RUN + group * lanes
            with T.If(column < width), T.Then(), T.vectorized(lanes) if lanes > 1 else nullcontext(0) as n:
                result = (sums[run * RUN + group * lanes + n] / total[0]).astype(str(self.output.dtype))
                T.buffer_store(self.output, result, [*outer, query, column + n])


class _Fragments:
    """An array of fragments and the instructions on it."""

    def __init__(self, scope: str, dtype: str, count: int = 1) -> None:
        self.buffer = T.alloc_buffer((count * FRAGMENT * FRAGMENT,), dtype, scope=scope)

    def clear(self, index: int) -> None:
        T.evaluate(T.tvm_fill_fragment(self.buffer.data, *_SIZE, index, number(0)))

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
