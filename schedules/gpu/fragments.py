"""The five tensor core instructions that schedules use, for TVM's tensorize: each as loops in TIR and as its call.

Fragments are 16 x 16 x 16: factors in float16 or bfloat16, stored by rows in shared memory, and sums in float32. TVM
has these instructions for float16 and many more. But it registers all of them in one import, which takes half a minute.
"""

# mypy: disable-error-code="untyped-decorator"
from functools import cache
from typing import Any

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

SIZE = 16
DTYPES = ("float16", "bfloat16")


@cache
def fragments_of(dtype: str) -> dict[str, str]:
    """Return TVM's names of the instructions for factors in ``float16`` or ``bfloat16``, by kind.

    They are registered with TVM once per process.
    """
    meanings = {
        "load_left": _copy("shared", "wmma.matrix_a", dtype, _load),
        "load_right": _copy("shared", "wmma.matrix_b", dtype, _load),
        "clear": _clear(),
        "multiply": _multiply(dtype),
        "store": _copy("wmma.accumulator", "shared", "float32", _store),
    }
    names = {kind: f"tvm_split.fragment_{kind}_{dtype}" for kind in meanings}
    for kind, (meaning, instruction) in meanings.items():
        TensorIntrin.register(names[kind], meaning, instruction)
    return names


def _number(fragment: Any, row_length: Any) -> Any:
    """Return the number of the fragment that holds a part of a matrix, whose fragments are numbered by rows."""
    row = fragment.elem_offset // row_length // SIZE
    column = fragment.elem_offset % row_length // SIZE
    return row * (row_length // SIZE) + column


def _load(source: Any, fragment: Any, source_row: Any, fragment_row: Any) -> Any:
    return T.tvm_load_matrix_sync(
        fragment.data, SIZE, SIZE, SIZE, _number(fragment, fragment_row),
        source.access_ptr("r", ptr_type=str(source.dtype)), source_row, "row_major", dtype="void",
    )  # fmt: skip


def _store(fragment: Any, result: Any, fragment_row: Any, result_row: Any) -> Any:
    return T.tvm_store_matrix_sync(
        fragment.data, SIZE, SIZE, SIZE, _number(fragment, fragment_row),
        result.access_ptr("w", ptr_type="float32"), result_row, "row_major", dtype="void",
    )  # fmt: skip


def _copy(source_scope: str, result_scope: str, dtype: str, call: Any) -> tuple[Any, Any]:
    @T.prim_func(s_tir=True)
    def meaning(source_handle: T.handle, result_handle: T.handle) -> None:
        source = T.match_buffer(source_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope=source_scope)
        result = T.match_buffer(result_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope=result_scope)
        with T.sblock("root"):
            T.reads(source[0:SIZE, 0:SIZE])
            T.writes(result[0:SIZE, 0:SIZE])
            for i, j in T.grid(SIZE, SIZE):
                with T.sblock("copy"):
                    row, column = T.axis.remap("SS", [i, j])
                    result[row, column] = source[row, column]

    @T.prim_func(s_tir=True)
    def instruction(source_handle: T.handle, result_handle: T.handle) -> None:
        source_row = T.int32()
        source_element = T.int32()
        result_row = T.int32()
        result_element = T.int32()
        source = T.match_buffer(
            source_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope=source_scope,
            strides=[source_row, source_element],
        )  # fmt: skip
        result = T.match_buffer(
            result_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope=result_scope,
            strides=[result_row, result_element],
        )  # fmt: skip
        with T.sblock("root"):
            T.reads(source[0:SIZE, 0:SIZE])
            T.writes(result[0:SIZE, 0:SIZE])
            T.evaluate(call(source, result, source_row, result_row))

    return meaning, instruction


def _clear() -> tuple[Any, Any]:
    @T.prim_func(s_tir=True)
    def meaning(handle: T.handle) -> None:
        total = T.match_buffer(handle, (SIZE, SIZE), "float32", align=64, offset_factor=SIZE, scope="wmma.accumulator")
        with T.sblock("root"):
            T.reads()
            T.writes(total[0:SIZE, 0:SIZE])
            for i, j in T.grid(SIZE, SIZE):
                with T.sblock("clear"):
                    row, column = T.axis.remap("SS", [i, j])
                    total[row, column] = T.float32(0)

    @T.prim_func(s_tir=True)
    def instruction(handle: T.handle) -> None:
        row_length = T.int32()
        element = T.int32()
        total = T.match_buffer(
            handle, (SIZE, SIZE), "float32", align=64, offset_factor=SIZE, scope="wmma.accumulator",
            strides=[row_length, element],
        )  # fmt: skip
        with T.sblock("root"):
            T.reads()
            T.writes(total[0:SIZE, 0:SIZE])
            T.evaluate(
                T.tvm_fill_fragment(
                    total.data, SIZE, SIZE, SIZE, _number(total, row_length), T.float32(0), dtype="void"
                )
            )

    return meaning, instruction


def _multiply(dtype: str) -> tuple[Any, Any]:
    @T.prim_func(s_tir=True)
    def meaning(left_handle: T.handle, right_handle: T.handle, total_handle: T.handle) -> None:
        left = T.match_buffer(left_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope="wmma.matrix_a")
        right = T.match_buffer(right_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope="wmma.matrix_b")
        total = T.match_buffer(
            total_handle, (SIZE, SIZE), "float32", align=64, offset_factor=SIZE, scope="wmma.accumulator"
        )
        with T.sblock("root"):
            T.reads(total[0:SIZE, 0:SIZE], left[0:SIZE, 0:SIZE], right[0:SIZE, 0:SIZE])
            T.writes(total[0:SIZE, 0:SIZE])
            for i, j, k in T.grid(SIZE, SIZE, SIZE):
                with T.sblock("multiply"):
                    row, column, step = T.axis.remap("SSR", [i, j, k])
                    total[row, column] = total[row, column] + T.Cast("float32", left[row, step]) * T.Cast(
                        "float32", right[step, column]
                    )

    @T.prim_func(s_tir=True)
    def instruction(left_handle: T.handle, right_handle: T.handle, total_handle: T.handle) -> None:
        left_row = T.int32()
        left_element = T.int32()
        right_row = T.int32()
        right_element = T.int32()
        total_row = T.int32()
        total_element = T.int32()
        left = T.match_buffer(
            left_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope="wmma.matrix_a",
            strides=[left_row, left_element],
        )  # fmt: skip
        right = T.match_buffer(
            right_handle, (SIZE, SIZE), dtype, align=64, offset_factor=SIZE, scope="wmma.matrix_b",
            strides=[right_row, right_element],
        )  # fmt: skip
        total = T.match_buffer(
            total_handle, (SIZE, SIZE), "float32", align=64, offset_factor=SIZE, scope="wmma.accumulator",
            strides=[total_row, total_element],
        )  # fmt: skip
        with T.sblock("root"):
            T.reads(total[0:SIZE, 0:SIZE], left[0:SIZE, 0:SIZE], right[0:SIZE, 0:SIZE])
            T.writes(total[0:SIZE, 0:SIZE])
            T.evaluate(
                T.tvm_mma_sync(
                    total.data, _number(total, total_row), left.data, _number(left, left_row),
                    right.data, _number(right, right_row), total.data, _number(total, total_row), dtype="void",
                )
            )  # fmt: skip

    return meaning, instruction
