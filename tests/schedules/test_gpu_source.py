"""The CUDA source of kernels, run on a CPU with barriers and instructions as they are, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from tvm import relax
from tvm.script import ir as I, relax as R, tirx as T

from schedules.gpu.whole_reduction import LONG
from tests.helpers.schedules.convolutions import expected
from tests.helpers.schedules.emulated_gpu import SM_90, evaluate, kernels, run_emulated
from tests.helpers.schedules.gpu_kernels import nvcc
from tests.helpers.schedules.schedule_harness import assert_close, normal

pytestmark = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA")

HALVES = {"float16": 1e-3, "bfloat16": 8e-3}
"""Tolerances where operands are rounded, and sums are not."""
halves = st.sampled_from(sorted(HALVES))


def product(dtype):
    def graph(builder, left, right):
        operands = [builder.emit(relax.op.astype(each, dtype)) for each in (left, right)]
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(*operands, out_dtype="float32"))))

    return graph


def exact_product(left, right):
    return np.maximum(left.astype("float64") @ right.astype("float64"), 0)


@settings(max_examples=5, derandomize=True)
@given(
    batch=st.sampled_from([((), ()), ((3,), ()), ((2, 1), (3,))]),
    rows=st.sampled_from([16, 17, 130]),
    depth=st.sampled_from([16, 50, 300]),
    columns=st.sampled_from([16, 17, 130]),
    dtype=halves,
)
def test_products_on_tensor_cores(batch, rows, depth, columns, dtype):
    left, right = normal(0, *batch[0], rows, depth), normal(1, *batch[1], depth, columns)
    actual, chosen = evaluate(product(dtype), [left, right])
    assert_close(actual, exact_product(left, right), HALVES[dtype])
    assert chosen == {"tensor_core", "elementwise"}


@settings(max_examples=6, derandomize=True)
@given(
    inputs=st.sampled_from([16, 24, 33]),
    outputs=st.sampled_from([16, 40]),
    size=st.tuples(st.sampled_from([7, 12]), st.sampled_from([7, 13])),
    kernel=st.sampled_from([1, 2, 3]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    dilation=st.sampled_from([1, 2]),
    dtype=halves,
)
def test_convolutions_on_tensor_cores(inputs, outputs, size, kernel, stride, padding, dilation, dtype):
    x, weight, bias = normal(0, 2, inputs, *size), normal(1, outputs, inputs, kernel, kernel), normal(2, outputs)
    attributes = {"strides": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation)}

    def graph(builder, data, residual):
        operands = [builder.emit(relax.op.astype(each, dtype)) for each in (data, relax.const(weight))]
        y = builder.emit(relax.op.nn.conv2d(*operands, out_dtype="float32", **attributes))
        y = builder.emit(relax.op.add(y, relax.const(bias.reshape(1, -1, 1, 1))))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(y, residual))))

    exact = expected(x, weight, bias, residual=1, **attributes)
    actual, chosen = evaluate(graph, [x, np.ones(exact.shape, "float32")])
    assert_close(actual, exact, HALVES[dtype])
    assert chosen == {"tensor_core", "elementwise"}


@pytest.mark.parametrize(("shape", "weights"), [((2, 19, 9, 9), (20, 19, 3, 3)), ((2, 8, 7, 7), (8, 1, 3, 3))])
def test_convolutions(shape, weights):
    x, weight, bias = normal(0, *shape), normal(1, *weights), normal(2, weights[0])
    attributes = {"padding": (1, 1), "strides": (2, 2), "groups": shape[1] // weights[1]}

    def graph(builder, data):
        y = builder.emit(relax.op.nn.conv2d(data, relax.const(weight), **attributes))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(y, relax.const(bias.reshape(1, -1, 1, 1))))))

    actual, chosen = evaluate(graph, [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen == {"conv2d" if attributes["groups"] == 1 else "depthwise_conv2d"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 1500, 70), (3, 50, 130), (40, 1500, 35), (130, 130, 2)])
def test_products_whose_sums_are_in_slices(rows, depth, columns, dtype):
    left, right = normal(0, rows, depth), normal(1, depth, columns)
    actual, chosen = evaluate(product(dtype), [left, right])
    assert_close(actual, exact_product(left, right), {"float32": 1e-4, **HALVES}[dtype])
    assert chosen <= {"few_rows", "matmul", "tensor_core", "elementwise"}


@pytest.mark.parametrize("extent", [7, 130])
def test_sums_that_threads_share(extent):
    x, gamma, beta = 3 * normal(0, 2, 3, extent), normal(1, extent), normal(2, extent)

    def graph(builder, data):
        weights = relax.const(gamma), relax.const(beta)
        normed = builder.emit(relax.op.nn.layer_norm(data, *weights, axes=[-1], epsilon=1e-5))
        return builder.emit(relax.op.nn.softmax(normed, -1))

    actual, chosen = evaluate(graph, [x])
    exact, scale, shift = (torch.tensor(array.astype("float64")) for array in (x, gamma, beta))
    reference = torch.softmax(torch.nn.functional.layer_norm(exact, (extent,), scale, shift, 1e-5), -1)
    assert_close(actual, reference.numpy(), tolerance=1e-3)
    assert chosen <= {"general_reduction", "reduction", "elementwise"}


@pytest.mark.parametrize("dtype", HALVES)
def test_functions_of_halves(dtype):
    x = (1 + np.abs(normal(0, 5, 37))).astype(dtype)

    def graph(builder, data):
        gate = builder.emit(relax.op.nn.silu(data))
        return builder.emit(relax.op.add(gate, builder.emit(relax.op.log(builder.emit(relax.op.rsqrt(data))))))

    actual, chosen = evaluate(graph, [x])
    exact = x.astype("float64")
    assert_close(actual.astype("float64"), exact / (1 + np.exp(-exact)) - np.log(exact) / 2, 4 * HALVES[dtype])
    assert chosen == {"elementwise"}


def of_all(*operators):
    def graph(builder, data):
        result = data
        for operator in operators:
            result = builder.emit(operator(result))
        return result

    return graph


SCALARS = {
    "mean": (of_all(relax.op.mean), np.mean),
    "with what follows": (
        of_all(relax.op.mean, relax.op.nn.relu, lambda x: relax.op.add(x, relax.const(1.0))),
        lambda x: np.maximum(x.mean(), 0) + 1,
    ),
    "with another": (
        lambda builder, x: builder.emit(relax.op.add(builder.emit(relax.op.mean(x)), builder.emit(relax.op.max(x)))),
        lambda x: x.mean() + x.max(),
    ),
    "two in turn": (of_all(relax.op.std), np.std),
    "largest": (of_all(relax.op.max), np.max),
    "with its axes": (of_all(lambda x: relax.op.min(x, keepdims=True)), lambda x: x.min(keepdims=True)),
    "spread again": (of_all(lambda x: relax.op.subtract(x, relax.op.mean(x))), lambda x: x - x.mean()),
    "a place": (of_all(lambda x: relax.op.argmax(relax.op.reshape(x, (-1,)))), np.argmax),
}


@pytest.mark.parametrize("shape", [(3, 11), (3000, 11)], ids=str)
@pytest.mark.parametrize(("graph", "exact"), SCALARS.values(), ids=SCALARS)
def test_scalars_of_all_elements(graph, exact, shape):
    x = 1 + normal(0, *shape)
    actual, chosen = evaluate(graph, [x])
    assert_close(actual, np.asarray(exact(x.astype("float64"))))
    assert "fallback" not in chosen
    assert "whole_reduction" in chosen or x.size < LONG


@pytest.mark.parametrize("graph", [of_all(relax.op.nn.relu), of_all(relax.op.exp, relax.op.negative)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_one_scalar(graph, dtype):
    x = np.asarray(3, dtype)
    actual, chosen = evaluate(lambda builder, data: graph(builder, builder.emit(relax.op.astype(data, "float32"))), [x])
    assert actual.shape == ()
    assert_close(actual, np.asarray(3.0 if actual > 0 else -np.exp(3.0)))
    assert chosen == {"elementwise"}


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_the_largest_of_all_elements_in_other_types(dtype):
    x = (100 * normal(0, 170, 113)).astype(dtype)
    actual, chosen = evaluate(of_all(relax.op.max), [x])
    assert actual == x.max()
    assert chosen == {"whole_reduction"}


@settings(max_examples=12, derandomize=True)
@given(
    shape=st.sampled_from([(3, 5, 7, 7), (2, 40, 3, 4), (70, 33), (2, 130)]),
    axes=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    name=st.sampled_from(["max", "min", "prod"]),
    keepdims=st.booleans(),
    dtype=st.sampled_from(["float32", "float16", "int32"]),
    followed=st.booleans(),
)
@example(shape=(2, 64, 7, 7), axes={2, 3}, name="max", keepdims=True, dtype="bfloat16", followed=True)
@example(shape=(2, 64, 7, 7), axes={1}, name="min", keepdims=False, dtype="bfloat16", followed=False)
def test_extremes_and_products_are_shared_as_sums_are(shape, axes, name, keepdims, dtype, followed):
    axes = sorted(axis for axis in axes if axis < len(shape)) or [0]
    x = 8 * normal(0, *shape)
    if name == "prod":  # of ones and a few others, so that no order of multiplying matters
        x = np.where(np.arange(x.size).reshape(shape) % 37 == 5, -2, 1)
    x = x.astype(dtype)

    def graph(builder, data):
        result = builder.emit(getattr(relax.op, name)(data, axes, keepdims=keepdims))
        return builder.emit(relax.op.negative(result)) if followed else result

    actual, chosen = evaluate(graph, [x])
    exact = getattr(np, name)(x.astype("float64"), tuple(axes), keepdims=keepdims)
    with np.errstate(over="ignore"):
        exact = np.asarray(-exact if followed else exact).astype(dtype)
    assert np.array_equal(actual.astype("float64"), exact.astype("float64"))
    assert chosen <= {"reduction", "general_reduction", "whole_reduction", "elementwise"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axes"), [((40, 70), [1]), ((40, 70), [0]), ((3, 11), None), ((170, 113), None)])
@pytest.mark.parametrize(("name", "nothing"), [("max", -np.inf), ("min", np.inf)])
def test_extremes_of_infinities(name, nothing, shape, axes, dtype):
    x = np.full(shape, nothing, dtype)
    actual, chosen = evaluate(lambda builder, data: builder.emit(getattr(relax.op, name)(data, axes)), [x])
    assert np.array_equal(actual, getattr(np, name)(x, axes and tuple(axes)))
    assert chosen <= {"reduction", "whole_reduction"}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("name", "nothing"), [("argmax", -np.inf), ("argmin", np.inf)])
def test_places_of_infinities(name, nothing, axis):
    x = np.full((40, 70), nothing, "float32")
    x[7, 9] = 0
    actual, chosen = evaluate(lambda builder, data: builder.emit(getattr(relax.op, name)(data, axis)), [x])
    assert np.array_equal(actual, getattr(np, name)(x, axis))
    assert chosen <= {"general_reduction"}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int16", "uint8"])
@pytest.mark.parametrize("axis", [None, -1])
def test_reductions_in_types_that_threads_cannot_hand_on(axis, dtype):
    """Threads of a warp would race in shared memory: the order in which they run changes nothing."""
    x = np.arange(64).reshape(8, 8).astype(dtype)
    actual, _ = evaluate(lambda builder, data: builder.emit(relax.op.max(data, axis)), [x])
    assert np.array_equal(actual.astype("float32"), x.max(axis).astype("float32"))


@settings(max_examples=8, derandomize=True)
@given(
    shape=st.sampled_from([(1, 1), (2, 7), (3, 100), (1, 257), (2, 600), (2, 5, 3), (1, 3000)]),
    axis=st.sampled_from([-1, 0, None]),
    name=st.sampled_from(["cumsum", "cumprod"]),
    exclusive=st.booleans(),
    dtype=st.sampled_from(["float32", "int64"]),
)
@example(shape=(2, 100), axis=-1, name="cumsum", exclusive=False, dtype="float32")
def test_scans(shape, axis, name, exclusive, dtype):
    x = (1 + normal(0, *shape) / 50).astype("float32") if dtype == "float32" else np.ones(shape, dtype)
    operator = getattr(relax.op, name)
    actual, chosen = evaluate(lambda builder, data: builder.emit(operator(data, axis, exclusive=exclusive)), [x])
    exact = getattr(np, name)(x.astype("float64"), axis)
    if exclusive:
        along = 0 if axis is None else axis
        first = np.full_like(exact.take([0], along), int(name == "cumprod"))
        exact = np.concatenate([first, exact.take(range(exact.shape[along] - 1), along)], along)
    assert actual.dtype == dtype
    assert_close(actual, exact)
    assert chosen == {"scan"}


@pytest.mark.parametrize("places", ["int32", "int64"])
def test_rows_of_a_table(places):
    table, rows = normal(0, 40, 12), np.array([[3, 39, 0], [7, 7, 21]], places)
    actual, _ = evaluate(lambda builder, *given: builder.emit(relax.op.take(*given, axis=0)), [table, rows])
    assert np.array_equal(actual, table[rows])


def test_rows_that_are_written_into_a_table():
    table, rows, places = normal(0, 40, 12), normal(1, 2, 12), np.array([[3], [39]], "int64")
    written = table.copy()
    written[places[:, 0]] = rows
    actual, _ = evaluate(lambda builder, *given: builder.emit(relax.op.scatter_nd(*given)), [table, places, rows])
    assert np.array_equal(actual, written)


def test_the_larger_of_two_wide_integers():
    left, right = (np.random.default_rng(seed).integers(-(2**60), 2**60, (3, 50)) for seed in (0, 1))
    actual, _ = evaluate(lambda builder, *given: builder.emit(relax.op.maximum(*given)), [left, right])
    assert np.array_equal(actual, np.maximum(left, right))


def test_sorted_rows():
    x = normal(0, 3, 37)
    actual, _ = evaluate(lambda builder, data: builder.emit(relax.op.sort(data, axis=-1)), [x])
    assert np.array_equal(actual, np.sort(x, -1))


TURNED = """
extern "C" __global__ void __launch_bounds__(64) turned(float* __restrict__ values) {
  __shared__ alignas(64) float shared[64];
  shared[threadIdx.x] = values[threadIdx.x];
  BARRIER
  values[threadIdx.x] = shared[63 - threadIdx.x];
}
"""


def turned(barrier, folder, backwards):
    values = np.arange(64, dtype="float32")
    launch = kernels(TURNED.replace("BARRIER", barrier), {"turned": ("threadIdx.x",)}, folder)["turned"]
    launch(backwards, values.ctypes.data, 64)
    return values


@pytest.mark.parametrize("backwards", [False, True])
def test_a_barrier_that_is_missing_shows(backwards, tmp_path):
    for name, barrier in {"ordered": "__syncthreads();", "loose": ""}.items():
        (tmp_path / name).mkdir()
        values = turned(barrier, tmp_path / name, backwards)
        assert np.array_equal(values, np.arange(64)[::-1]) == bool(barrier)
        assert np.isnan(values).any() != bool(barrier)


@I.ir_module
class LastWins:
    """All threads write one number: a race, of which the order decides the end."""

    @T.prim_func(private=True, s_tir=True)
    def last(x: T.Buffer((64,), "float32"), y: T.Buffer((1,), "float32")):
        T.func_attr({"tirx.is_scheduled": True})
        for block in T.thread_binding(1, thread="blockIdx.x"):
            for thread in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("last"):
                    number = T.axis.spatial(64, block * 64 + thread)
                    y[0] = x[number]

    @R.function
    def main(x: R.Tensor((64,), "float32")) -> R.Tensor((1,), "float32"):
        with R.dataflow():
            y = R.call_tir(LastWins.last, (x,), out_ty=R.Tensor((1,), "float32"))
            R.output(y)
        return y


@pytest.mark.parametrize("even", [False, True])
def test_a_result_that_depends_on_the_order_of_threads_is_an_error(even):
    x = np.zeros(64, "float32") if even else np.arange(64, dtype="float32")
    if even:
        assert run_emulated(LastWins, [x], SM_90) == [0]
    else:
        with pytest.raises(RuntimeError, match="the result depends on which threads"):
            run_emulated(LastWins, [x], SM_90)


TWO_TYPES = """
extern "C" __global__ void __launch_bounds__(32) shuffled(float* __restrict__ values, int* __restrict__ numbers) {
  float value = __shfl_sync(~0u, values[threadIdx.x], SOURCE);
  int number = __shfl_sync(~0u, numbers[threadIdx.x], SOURCE);
  values[threadIdx.x] = value;
  numbers[threadIdx.x] = number;
}
"""


@pytest.mark.parametrize(("backwards", "source"), [(False, 0), (True, 31)])
def test_lanes_exchange_values_of_several_types(backwards, source, tmp_path):
    values, numbers = np.arange(1, 33, dtype="float32"), np.arange(101, 133, dtype="int32")
    launch = kernels(TWO_TYPES.replace("SOURCE", str(source)), {"shuffled": ("threadIdx.x",)}, tmp_path)["shuffled"]
    launch(backwards, values.ctypes.data, numbers.ctypes.data, 32)
    assert set(values) == {source + 1}
    assert set(numbers) == {source + 101}


def test_threads_that_wait_for_different_things_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="turned: threads of a block wait for different things: 0 __syncwarp"):
        turned("if (threadIdx.x < 8) { __syncwarp(); } else { __syncthreads(); }", tmp_path, False)
