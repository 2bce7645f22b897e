"""Arithmetic is that of NumPy in whatever chain it is fused: integers wrap, no difference of floats is simplified."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tvm import relax
from tvm.target import Target

from tests.helpers.schedules.emulated_gpu import on_cpu_and_gpu
from tests.helpers.schedules.schedule_harness import evaluate as evaluate_on_cpu
from tvm_split.compiler.targets import host_target

OPTIMISED = Target(host_target(1))
"""With LLVM's optimisations, which draw conclusions from operations that are said not to overflow."""
DTYPES = ["int32", "int64", "uint32", "uint64", "int16", "int8", "uint8"]
BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "bitwise_xor": np.bitwise_xor,
}  # fmt: skip
UNARY = {"negative": np.negative, "abs": np.abs, "square": np.square}
COMPARING = {"greater": np.greater, "less": np.less, "greater_equal": np.greater_equal, "equal": np.equal}


def ends(dtype: str, count: int) -> list[np.ndarray]:
    """Two arrays of numbers at both ends of a dtype, around 0 and between."""
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
    left = [highest, lowest, highest - 5, 121, 0, 1, highest // 3, lowest // 3 + 1, highest // 2 + 1]
    right = [highest - 4, 7, lowest, 3, highest, lowest + 1, 2, 100]
    return [np.resize(np.array(numbers, dtype), count) for numbers in (left, right)]


steps = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.none()),
    st.tuples(st.sampled_from(sorted(BINARY)), st.sampled_from(["left", "right", 0, 1, 100])),
)


@on_cpu_and_gpu
@settings(max_examples=10)
@given(
    dtype=st.sampled_from(DTYPES),
    chain=st.lists(steps, min_size=1, max_size=5),
    last=st.sampled_from(["", *sorted(COMPARING)]),
    count=st.sampled_from([6, 96]),
)
def test_chains_wrap(evaluate, dtype, chain, last, count):
    left, right = ends(dtype, count)
    chain = [step for step in chain if step[0] not in ("negative", "abs") or not dtype.startswith("u")]
    arrays = {"left": left, "right": right, **{number: np.array(number, dtype) for number in (0, 1, 100)}}
    expected = left
    with warnings.catch_warnings(action="ignore"):
        for name, other in chain:
            expected = UNARY[name](expected) if other is None else BINARY[name](expected, arrays[other])
        expected = COMPARING[last](expected, left) if last else expected + right

    def graph(builder, x, y):
        operands = {"left": x, "right": y, **{number: relax.const(number, dtype) for number in (0, 1, 100)}}
        value = x
        for name, other in chain:
            arguments = [value] if other is None else [value, operands[other]]
            value = builder.emit(getattr(relax.op, name)(*arguments))
        return builder.emit(getattr(relax.op, last)(value, x) if last else relax.op.add(value, y))

    actual, _ = evaluate(graph, [left, right])
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_no_optimisation_assumes_that_nothing_overflows(dtype):
    left, right = ends(dtype, 96)
    one, thousand = relax.const(1, dtype), relax.const(1000, dtype)

    def graph(builder, x, y):
        emit = builder.emit
        more = emit(relax.op.astype(emit(relax.op.greater(emit(relax.op.add(x, one)), x)), dtype))
        divided = emit(relax.op.floor_divide(emit(relax.op.multiply(x, thousand)), thousand))
        spread = emit(relax.op.subtract(emit(relax.op.maximum(x, y)), emit(relax.op.minimum(x, y))))
        return emit(relax.op.concat([more, divided, spread]))

    actual, _ = evaluate_on_cpu(graph, [left, right], OPTIMISED)
    with warnings.catch_warnings(action="ignore"):
        more = (left + np.array(1, dtype) > left).astype(dtype)
        divided = left * np.array(1000, dtype) // np.array(1000, dtype)
        spread = np.maximum(left, right) - np.minimum(left, right)
    np.testing.assert_array_equal(actual, np.concatenate([more, divided, spread]))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("is_constant", [True, False])
def test_the_lowest_number_divided_by_minus_one(dtype, is_constant):
    """The processor stops at this division; NumPy's result is the lowest number, its rest 0."""
    left, _ = ends(dtype, 12)
    right = np.resize(np.array([-1, -1, 3, -7], dtype), 12)

    def graph(builder, x, y=None):
        y = relax.const(right, dtype) if is_constant else y
        results = (relax.op.floor_divide, relax.op.divide, relax.op.floor_mod, relax.op.mod)
        return builder.emit(relax.op.concat([builder.emit(result(x, y)) for result in results]))

    actual, _ = evaluate_on_cpu(graph, [left] if is_constant else [left, right], OPTIMISED)
    with warnings.catch_warnings(action="ignore"):
        floor, rest = left // right, left % right
        towards_zero = np.where((rest != 0) & (right < 0) != (left < 0) & (rest != 0), floor + 1, floor)
    np.testing.assert_array_equal(actual, np.concatenate([floor, towards_zero, rest, np.fmod(left, right)]))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_what_is_always_zero(dtype):
    x, _ = ends(dtype, 96)

    def graph(builder, data):
        nothing = builder.emit(relax.op.multiply(data, relax.const(0, dtype)))
        return builder.emit(relax.op.concat([nothing, builder.emit(relax.op.subtract(data, data))]))

    actual, _ = evaluate_on_cpu(graph, [x], OPTIMISED)
    np.testing.assert_array_equal(actual, np.zeros(192, dtype))


@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "uint8", "uint32"])
def test_a_division_by_zero_that_is_guarded(evaluate, dtype):
    """A simplifier may drop the inner condition, since the outer one says the same, and then divide by zero."""
    left, _ = ends(dtype, 96)
    right = np.resize(np.array([0, 3, 1, 7, 2, 0], dtype), 96)

    def graph(builder, x, y):
        emit, zero, one = builder.emit, relax.const(0, dtype), relax.const(1, dtype)
        is_positive = emit(relax.op.greater(y, zero))
        divisor = emit(relax.op.where(is_positive, y, one))
        results = [
            emit(relax.op.where(is_positive, emit(divide(x, divisor)), zero))
            for divide in (relax.op.floor_divide, relax.op.floor_mod)
        ]
        return emit(relax.op.concat([*results, emit(relax.op.floor_divide(x, y)), emit(relax.op.floor_mod(x, y))]))

    actual, _ = evaluate(graph, [left, right])
    with np.errstate(divide="ignore"):
        quotient, rest = left // right, left % right
    guarded = [np.where(right > 0, quotient, 0), np.where(right > 0, rest, 0)]
    np.testing.assert_array_equal(actual, np.concatenate([*guarded, quotient, rest]))


@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_differences_of_floats_are_not_simplified(evaluate, dtype):
    x = np.resize(np.array([1e4, -3, 0.1, np.inf, np.nan, 0.0, -0.0, 65504], dtype), 96)
    y = np.resize(np.array([0.3, 1e3, np.inf, 7, -1, 0.0, 2.5], dtype), 96)

    def graph(builder, a, b):
        emit, subtract = builder.emit, relax.op.subtract
        total = emit(relax.op.add(a, b))
        return emit(
            relax.op.concat(
                [emit(subtract(total, a)), emit(subtract(total, b)), emit(subtract(a, a)), emit(subtract(a, total))]
            )
        )

    actual, _ = evaluate(graph, [x, y])
    with np.errstate(invalid="ignore", over="ignore"):
        total = x + y
        expected = np.concatenate([total - x, total - y, x - x, x - total])
    np.testing.assert_array_equal(actual, expected)


@on_cpu_and_gpu
def test_a_cast_to_bfloat16_rounds_where_nothing_stores_its_result(evaluate):
    x = np.concatenate(
        [np.linspace(-3, 3, 90, dtype=np.float32), [np.inf, -np.inf, np.nan, 3.4e38, 1e-40, -0.0]]
    ).astype(np.float32)

    def graph(builder, data):
        rounded = builder.emit(relax.op.astype(builder.emit(relax.op.astype(data, "bfloat16")), "float32"))
        return builder.emit(relax.op.multiply(rounded, relax.const(3, "float32")))

    actual, _ = evaluate(graph, [x])
    np.testing.assert_array_equal(actual, torch.from_numpy(x).bfloat16().float().numpy() * np.float32(3))
