"""The five tensor core instructions that schedules use, for TVM's tensorize: each as loops in TIR and as its call.

Fragments are 16 x 16 x 16: factors in float16 or bfloat16, stored by rows in shared memory, and sums in float32. TVM
has these instructions for float16 and many more. But it registers all of them in one import, which takes half a minute.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder, tirx as T

SIZE = 16
DTYPES = ("float16", "bfloat16")
_TOTAL = ("wmma.accumulator", "float32")
"""The memory and dtype of sums."""
Emit = Callable[..., None]
"""Emits statements on a fragment of each matrix."""


@cache
def fragments_of(dtype: str) -> dict[str, str]:
    """Return TVM's names of the instructions for factors in ``float16`` or ``bfloat16``, by kind.

    They are registered with TVM once per process.
    """
    left, right = ("wmma.matrix_a", dtype), ("wmma.matrix_b", dtype)
    # Each with its matrices, the positions of those that it reads, its loops and its call; it writes the last matrix.
    instructions: dict[str, tuple[Sequence[tuple[str, str]], Sequence[int], Emit, Emit]] = {
        "load_left": ([("shared", dtype), left], [0], _copy, _load),
        "load_right": ([("shared", dtype), right], [0], _copy, _load),
        "clear": ([_TOTAL], [], _clear, _fill),
        "multiply": ([left, right, _TOTAL], [2, 0, 1], _multiply, _add_product),
        "store": ([_TOTAL, ("shared", "float32")], [0], _copy, _store),
    }
    names = {kind: f"tvm_split.fragment_{kind}_{dtype}" for kind in instructions}
    for kind, (matrices, reads, loops, call) in instructions.items():
        instruction = _function(matrices, reads, call, has_rows=True)
        TensorIntrin.register(names[kind], _function(matrices, reads, loops), instruction)
    return names


def _function(
    matrices: Sequence[tuple[str, str]], reads: Sequence[int], emit: Emit, *, has_rows: bool = False
) -> tirx.PrimFunc:
    """Return the function that ``emit`` writes of one fragment of each matrix; ``has_rows``: matrices may be larger."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        handles = [T.arg(f"matrix_{number}", T.handle()) for number in range(len(matrices))]
        parts = [
            T.match_buffer(
                handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope=scope,
                strides=[T.int32(), T.int32()] if has_rows else None,
            )
            for handle, (scope, dtype) in zip(handles, matrices, strict=True)
        ]  # fmt: skip
        with T.sblock("root"):
            T.reads(*(parts[position][0:SIZE, 0:SIZE] for position in reads))
            T.writes(parts[-1][0:SIZE, 0:SIZE])
            emit(*parts)
    return builder.get()


def _copy(source: Any, result: Any) -> None:
    with T.grid(SIZE, SIZE) as (i, j), T.sblock("copy"):
        row, column = T.axis.remap("SS", [i, j])
        T.buffer_store(result, source[row, column], [row, column])


def _clear(total: Any) -> None:
    with T.grid(SIZE, SIZE) as (i, j), T.sblock("clear"):
        row, column = T.axis.remap("SS", [i, j])
        T.buffer_store(total, T.float32(0), [row, column])


def _multiply(left: Any, right: Any, total: Any) -> None:
    with T.grid(SIZE, SIZE, SIZE) as (i, j, k), T.sblock("multiply"):
        row, column, step = T.axis.remap("SSR", [i, j, k])
        product = T.Cast("float32", left[row, step]) * T.Cast("float32", right[step, column])
        T.buffer_store(total, total[row, column] + product, [row, column])


def _fragment(part: Any) -> tuple[Any, ...]:
    """Return the memory of a part of a matrix and the number of its fragment; fragments are numbered by rows."""
    row_length = part.strides[0]
    row = part.elem_offset // row_length // SIZE
    column = part.elem_offset % row_length // SIZE
    return part.data, row * (row_length // SIZE) + column


def _sized(part: Any) -> tuple[Any, ...]:
    data, number = _fragment(part)
    return data, SIZE, SIZE, SIZE, number


def _load(source: Any, fragment: Any) -> None:
    pointer = source.access_ptr("r", ptr_type=str(source.dtype))
    T.evaluate(T.tvm_load_matrix_sync(*_sized(fragment), pointer, source.strides[0], "row_major", dtype="void"))


def _store(fragment: Any, result: Any) -> None:
    pointer = result.access_ptr("w", ptr_type="float32")
    T.evaluate(T.tvm_store_matrix_sync(*_sized(fragment), pointer, result.strides[0], "row_major", dtype="void"))


def _fill(total: Any) -> None:
    T.evaluate(T.tvm_fill_fragment(*_sized(total), T.float32(0), dtype="void"))


def _add_product(left: Any, right: Any, total: Any) -> None:
    sums = _fragment(total)
    T.evaluate(T.tvm_mma_sync(*sums, *_fragment(left), *_fragment(right), *sums, dtype="void"))
