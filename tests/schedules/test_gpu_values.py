"""Kernels scheduled for CUDA, run with their threads one after another, against torch and numpy in float64."""

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given, settings, strategies as st
from tvm import relax, tirx

import schedules
from schedules.blocks import find_parts, new_schedule
from schedules.gpu.tensor_core import schedule_tensor_core
from schedules.gpu.tile import TENSOR_CORE, gpu_of
from schedules.gpu.tiling_space import FRAGMENTS
from tests.helpers.schedules.convolutions import convolution, expected
from tests.helpers.schedules.gpu_kernels import cuda
from tests.helpers.schedules.schedule_harness import assert_close, fuse, graph_of, lower, normal, rules, run
from tests.helpers.schedules.serial_threads import without_threads

SM_90 = cuda("sm_90")


def evaluate_serially(graph, inputs):
    lowered = lower(graph_of(graph, inputs), SM_90)
    return run(without_threads(lowered), inputs), rules(lowered)


def evaluate_fragments(graph, inputs):
    """The same, with plain loops in the place of tensor core instructions."""
    fused = fuse(graph_of(graph, inputs), SM_90)
    scheduled = tvm.IRModule(fused.functions, attrs=fused.attrs, global_infos=fused.global_infos)
    for variable, function in fused.functions_items():
        if isinstance(function, tirx.PrimFunc):
            made = new_schedule(function)
            parts = find_parts(made, TENSOR_CORE)
            if parts is not None:
                space = FRAGMENTS.template(TENSOR_CORE, TENSOR_CORE).space(function, gpu_of(SM_90))
                schedule_tensor_core(made, parts, FRAGMENTS.tiling_of(space.default), with_instructions=False)
                scheduled.update_func(variable, made.mod["main"].with_attr("tirx.is_scheduled", True))
                return run(without_threads(schedules.apply(scheduled, SM_90)), inputs)
    raise AssertionError("no kernel is for tensor cores")


@settings(max_examples=16)
@given(
    inputs=st.sampled_from([1, 3, 17, 64, 130]),
    outputs=st.sampled_from([1, 3, 8, 17, 130]),
    size=st.tuples(st.sampled_from([1, 7, 13]), st.sampled_from([1, 7, 12, 13])),
    kernel=st.sampled_from([1, 2, 3]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    dilation=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 3]),
)
def test_convolution(inputs, outputs, size, kernel, stride, padding, dilation, batch):
    kernel = kernel if dilation * (kernel - 1) < min(size) + 2 * padding else 1
    x, weight, bias = normal(0, batch, inputs, *size), normal(1, outputs, inputs, kernel, kernel), normal(2, outputs)
    attributes = {"strides": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation)}
    actual, chosen = evaluate_serially(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen <= {"conv2d", "few_rows", "depthwise_conv2d"}


@settings(max_examples=8)
@given(
    channels=st.sampled_from([1, 3, 17, 130]),
    multiplier=st.sampled_from([1, 2]),
    size=st.sampled_from([1, 7, 13, 32]),
    kernel=st.sampled_from([3, 5]),
    stride=st.sampled_from([1, 2]),
    dilation=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 3]),
)
def test_depthwise_convolution(channels, multiplier, size, kernel, stride, dilation, batch):
    outputs = channels * multiplier
    x, weight, bias = normal(0, batch, channels, size, size), normal(1, outputs, 1, kernel, kernel), normal(2, outputs)
    padding = dilation * (kernel // 2)
    attributes = {
        "strides": (stride, stride),
        "padding": (padding, padding),
        "dilation": (dilation, dilation),
        "groups": channels,
    }
    actual, chosen = evaluate_serially(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen == {"depthwise_conv2d"}


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(32, 64, 2), (48, 96, 3), (6, 12, 3), (34, 68, 2)])
def test_grouped_convolution(inputs, outputs, groups):
    x, weight, bias = normal(0, 2, inputs, 7, 7), normal(1, outputs, inputs // groups, 3, 3), normal(2, outputs)
    attributes = {"padding": (1, 1), "groups": groups}
    actual, chosen = evaluate_serially(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen <= {"conv2d", "few_rows"}


def test_uneven_padding():
    x, weight, bias = normal(0, 1, 16, 9, 9), normal(1, 16, 16, 3, 3), normal(2, 16)
    actual, _ = evaluate_serially(convolution(weight, bias, padding=(0, 2, 1, 0), strides=(2, 1)), [x])
    padded = np.pad(x, ((0, 0), (0, 0), (0, 1), (2, 0)))
    assert_close(actual, expected(padded, weight, bias, strides=(2, 1)))


def any_convolution(axes, transposed, half, inputs, weight, attributes):
    name = f"conv{axes}d" + ("_transpose" if transposed else "")

    def graph(builder, data):
        operands = data, relax.const(weight)
        if half is not None:
            operands = [builder.emit(relax.op.astype(each, half)) for each in operands]
        y = builder.emit(getattr(relax.op.nn, name)(*operands, out_dtype="float32", **attributes))
        return builder.emit(relax.op.nn.relu(y))

    given = {name: value for name, value in attributes.items() if name != "strides"} | {"stride": attributes["strides"]}
    operator = getattr(torch.nn.functional, f"conv_transpose{axes}d" if transposed else f"conv{axes}d")
    exact = operator(*(torch.tensor(each.astype("float64")) for each in (inputs, weight)), **given)
    return graph, np.maximum(exact.numpy(), 0)


@settings(max_examples=20)
@given(
    axes=st.sampled_from([1, 2, 3]),
    transposed=st.booleans(),
    inputs=st.sampled_from([1, 6, 20]),
    outputs=st.sampled_from([2, 12]),
    groups=st.sampled_from([1, 2, 6]),
    kernel=st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3),
    strides=st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3),
    dilation=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    more=st.booleans(),
)
def test_convolutions_over_any_axes(
    axes, transposed, inputs, outputs, groups, kernel, strides, dilation, padding, more
):
    groups = groups if inputs % groups == outputs % groups == 0 else 1
    kernel, strides = kernel[:axes], strides[:axes]
    x = normal(0, 2, inputs, *(7, 6, 5)[:axes])
    weight = normal(1, *((inputs, outputs // groups) if transposed else (outputs, inputs // groups)), *kernel)
    attributes = {"strides": strides, "padding": [padding] * axes, "dilation": [dilation] * axes, "groups": groups}
    if transposed:
        attributes["output_padding"] = [int(more and stride > 1) for stride in strides]
    graph, exact = any_convolution(axes, transposed, None, x, weight, attributes)
    actual, chosen = evaluate_serially(graph, [x])
    assert_close(actual, exact)
    assert chosen <= {"conv2d", "few_rows", "depthwise_conv2d"}


@pytest.mark.parametrize("transposed", [False, True], ids=["direct", "transposed"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_half_precision_convolutions_over_any_axes_in_fragments(axes, transposed):
    x, weight = normal(0, 2, 24, *(27, 6, 5)[:axes]), normal(1, 24, 24, *(3, 2, 3)[:axes])
    attributes = {"strides": [2] * axes, "padding": [1] * axes}
    graph, exact = any_convolution(axes, transposed, "float16", x, weight, attributes)
    assert_close(evaluate_fragments(graph, [x]), exact, 2e-3)


def test_residual_is_added_in_the_same_kernel():
    x, weight, bias = normal(0, 1, 32, 28, 28), normal(1, 32, 32, 3, 3), normal(2, 32)
    actual, chosen = evaluate_serially(convolution(weight, bias, padding=(1, 1)), [x, x])
    assert chosen == {"conv2d"}
    assert_close(actual, expected(x, weight, bias, residual=x, padding=(1, 1)))


def test_weights_that_are_no_constant():
    x, weight = normal(0, 1, 16, 7, 7), normal(1, 24, 16, 3, 3)

    def graph(builder, data, kernel):
        return builder.emit(relax.op.nn.conv2d(data, kernel, padding=(1, 1)))

    actual, chosen = evaluate_serially(graph, [x, weight])
    exact = (torch.tensor(array.astype("float64")) for array in (x, weight))
    assert_close(actual, torch.nn.functional.conv2d(*exact, padding=1).numpy())
    assert chosen == {"conv2d", "elementwise"}


extents = st.sampled_from([1, 3, 7, 13, 16, 17, 64, 130])
BATCHES = [((), ()), ((3,), ()), ((2, 3), (2, 3)), ((3,), (1,)), ((1,), (3,)), ((), (3,)), ((2, 1), (3,))]


@settings(max_examples=20)
@given(batch=st.sampled_from(BATCHES), rows=extents, depth=extents, columns=extents)
def test_matmul(batch, rows, depth, columns):
    left, right, bias = normal(0, *batch[0], rows, depth), normal(1, *batch[1], depth, columns), normal(2, columns)

    def graph(builder, a, b):
        product = builder.emit(relax.op.matmul(a, b))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(product, relax.const(bias)))))

    actual, chosen = evaluate_serially(graph, [left, right])
    assert_close(actual, np.maximum(left.astype("float64") @ right.astype("float64") + bias, 0))
    assert chosen <= {"matmul", "few_rows"}


@pytest.mark.parametrize(("rows", "columns"), [(1, 200), (4, 200), (200, 1), (200, 3), (100, 40)])
def test_long_sums_are_cut_into_slices(rows, columns):
    left, right = normal(0, rows, 1500), normal(1, 1500, columns)
    actual, chosen = evaluate_serially(lambda builder, a, b: builder.emit(relax.op.matmul(a, b)), [left, right])
    assert_close(actual, left.astype("float64") @ right.astype("float64"))
    assert chosen == {"few_rows" if min(rows, columns) <= 4 else "matmul"}


def test_a_residual_larger_than_the_product():
    left, right, residual = normal(0, 1, 12, 20), normal(1, 20, 36), normal(2, 5, 12, 36)

    def graph(builder, a, b, c):
        return builder.emit(relax.op.add(builder.emit(relax.op.matmul(a, b)), c))

    actual, _ = evaluate_serially(graph, [left, right, residual])
    assert_close(actual, left.astype("float64") @ right.astype("float64") + residual)


@settings(max_examples=10)
@given(
    batch=st.sampled_from(BATCHES),
    rows=st.sampled_from([16, 17, 130]),
    depth=st.sampled_from([16, 24, 50, 130, 300]),
    columns=st.sampled_from([16, 17, 130, 192]),
)
def test_half_precision_in_fragments(batch, rows, depth, columns):
    left, right = (
        normal(0, *batch[0], rows, depth, dtype="float16"),
        normal(1, *batch[1], depth, columns, dtype="float16"),
    )
    bias = normal(2, columns, dtype="float16")

    def graph(builder, a, b):
        product = builder.emit(relax.op.matmul(a, b))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(product, relax.const(bias)))))

    actual = evaluate_fragments(graph, [left, right])
    assert actual.dtype == np.float16
    exact = np.maximum(left.astype("float64") @ right.astype("float64") + bias, 0)
    assert_close(actual, exact, tolerance=2e-3)


@pytest.mark.parametrize(("inputs", "outputs", "groups", "stride"), [(16, 24, 1, 1), (3, 40, 1, 2), (64, 96, 2, 1)])
def test_half_precision_convolution_in_fragments(inputs, outputs, groups, stride):
    x, weight = normal(0, 2, inputs, 14, 14), normal(1, outputs, inputs // groups, 3, 3)
    x, weight, bias = (array.astype("float16") for array in (x, weight, normal(2, outputs)))
    attributes = {"padding": (1, 1), "strides": (stride, stride), "groups": groups}
    actual = evaluate_fragments(convolution(weight, bias, out_dtype="float16", **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes), tolerance=2e-3)


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_dtypes(dtype):
    left, right = (4 * normal(0, 37, 130)).astype(dtype), (4 * normal(1, 130, 50)).astype(dtype)
    actual, chosen = evaluate_serially(lambda builder, a, b: builder.emit(relax.op.matmul(a, b)), [left, right])
    assert actual.dtype == np.dtype(dtype)
    assert chosen == {"matmul"}
    exact = left.astype("float64") @ right.astype("float64")
    assert_close(actual, exact, tolerance=1e-6)


@settings(max_examples=6)
@given(
    channels=st.sampled_from([3, 17, 130]),
    size=st.sampled_from([7, 13, 28]),
    window=st.sampled_from([2, 3]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    kind=st.sampled_from(["max", "avg"]),
)
def test_pooling(channels, size, window, stride, padding, kind):
    x = normal(0, 3, channels, size, size)
    operator = relax.op.nn.max_pool2d if kind == "max" else relax.op.nn.avg_pool2d
    pool = (window, window), (stride, stride), (padding, padding)
    actual, chosen = evaluate_serially(lambda builder, data: builder.emit(operator(data, *pool)), [x])
    exact = torch.tensor(x.astype("float64"))
    if kind == "max":
        reference = torch.nn.functional.max_pool2d(exact, window, stride, padding)
    else:
        reference = torch.nn.functional.avg_pool2d(exact, window, stride, padding, count_include_pad=False)
    assert_close(actual, reference.numpy())
    assert chosen <= {"pooling", "elementwise"}


@pytest.mark.parametrize("axes", [[0, 2, 1, 3], [0, 3, 1, 2], [3, 2, 1, 0]])
def test_transposes_and_concatenations(axes):
    x = normal(0, 2, 5, 7, 24)

    def graph(builder, data):
        moved = builder.emit(relax.op.permute_dims(data, axes))
        return builder.emit(relax.op.concat([moved, moved], axis=1))

    actual, chosen = evaluate_serially(graph, [x])
    moved = x.transpose(axes)
    assert np.array_equal(actual, np.concatenate([moved, moved], axis=1))
    assert chosen == {"elementwise"}


@pytest.mark.parametrize("shape", [(64, 64, 64), (3, 500, 700), (7,)])
def test_elements_are_computed_in_vectors_where_they_lie_side_by_side(shape):
    x, scale = normal(0, *shape), normal(1, *shape[-1:])

    def graph(builder, data, factor):
        product = builder.emit(relax.op.multiply(data, factor))
        return builder.emit(relax.op.add(product, builder.emit(relax.op.exp(product))))

    actual, chosen = evaluate_serially(graph, [x, scale])
    exact = x.astype("float64") * scale
    assert_close(actual, exact + np.exp(exact))
    assert chosen == {"elementwise"}


@settings(max_examples=6)
@given(rows=st.sampled_from([1, 3, 130]), extent=st.sampled_from([7, 64, 130, 768]))
def test_softmax_and_layer_norm(rows, extent):
    x, gamma, beta = 3 * normal(0, 2, rows, extent), normal(1, extent), normal(2, extent)

    def graph(builder, data):
        normed = builder.emit(
            relax.op.nn.layer_norm(data, relax.const(gamma), relax.const(beta), axes=[-1], epsilon=1e-5)
        )
        return builder.emit(relax.op.nn.softmax(normed, -1))

    actual, chosen = evaluate_serially(graph, [x])
    exact = torch.tensor(x.astype("float64"))
    scale, shift = (torch.tensor(array.astype("float64")) for array in (gamma, beta))
    reference = torch.softmax(torch.nn.functional.layer_norm(exact, (extent,), scale, shift, 1e-5), -1)
    assert_close(actual, reference.numpy(), tolerance=1e-3)
    assert chosen <= {"general_reduction", "reduction", "elementwise"}


@pytest.mark.parametrize("axes", [[2, 3], [1], [0, 1, 2, 3]])
def test_means(axes):
    x = normal(0, 2, 40, 7, 7)

    def graph(builder, data):
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.mean(data, axes))))

    actual, chosen = evaluate_serially(graph, [x])
    assert_close(actual, np.maximum(np.asarray(x.astype("float64").mean(tuple(axes))), 0))
    assert chosen <= {"reduction", "general_reduction", "fallback"}
