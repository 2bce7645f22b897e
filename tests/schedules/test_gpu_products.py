"""Products and convolutions for CUDA against float64: their source, run on a CPU with tensor core instructions.

`make test` runs one case per rule; the others are slow, because each compiles C++.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tvm import relax

from tests.helpers.schedules.convolutions import convolution, expected, product
from tests.helpers.schedules.emulated_gpu import evaluate
from tests.helpers.schedules.gpu_kernels import HALVES, halves, needs_headers, slow
from tests.helpers.schedules.schedule_harness import assert_close, normal

pytestmark = needs_headers


def exact_product(left, right):
    return np.maximum(left.astype("float64") @ right.astype("float64"), 0)


@pytest.mark.slow
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


@pytest.mark.slow
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
        operands = [builder.emit(relax.op.astype(operand, dtype)) for operand in (data, relax.const(weight))]
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
    actual, chosen = evaluate(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen == {"conv2d" if attributes["groups"] == 1 else "depthwise_conv2d"}


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype"),
    [
        (1, 1500, 70, "float32"),
        (40, 1500, 35, "float32"),
        (40, 1500, 35, "float16"),
        *slow((1, 1500, 70, "bfloat16"), (3, 50, 130, "float16"), (130, 130, 2, "bfloat16"), (130, 130, 2, "float32")),
    ],
)
def test_products_whose_sums_are_in_slices(rows, depth, columns, dtype):
    left, right = normal(0, rows, depth), normal(1, depth, columns)
    actual, chosen = evaluate(product(dtype), [left, right])
    assert_close(actual, exact_product(left, right), {"float32": 1e-4, **HALVES}[dtype])
    assert chosen <= {"matmul", "tensor_core", "elementwise"}


def any_convolution(axes, transposed, half, inputs, weight, attributes):
    name = f"conv{axes}d" + ("_transpose" if transposed else "")

    def graph(builder, data):
        operands = data, relax.const(weight)
        if half is not None:
            operands = [builder.emit(relax.op.astype(operand, half)) for operand in operands]
        y = builder.emit(getattr(relax.op.nn, name)(*operands, out_dtype="float32", **attributes))
        return builder.emit(relax.op.nn.relu(y))

    torch_attributes = {name: value for name, value in attributes.items() if name != "strides"} | {
        "stride": attributes["strides"]
    }
    operator = getattr(torch.nn.functional, f"conv_transpose{axes}d" if transposed else f"conv{axes}d")
    exact = operator(*(torch.tensor(array.astype("float64")) for array in (inputs, weight)), **torch_attributes)
    return graph, np.maximum(exact.numpy(), 0)


@pytest.mark.slow
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
    actual, chosen = evaluate(graph, [x])
    assert_close(actual, exact)
    assert chosen <= {"conv2d", "depthwise_conv2d"}


@pytest.mark.slow
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
    actual, chosen = evaluate(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen == {"depthwise_conv2d"}


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(32, 64, 2), (48, 96, 3), (6, 12, 3), (34, 68, 2)])
def test_grouped_convolution(inputs, outputs, groups):
    x, weight, bias = normal(0, 2, inputs, 7, 7), normal(1, outputs, inputs // groups, 3, 3), normal(2, outputs)
    attributes = {"padding": (1, 1), "groups": groups}
    actual, chosen = evaluate(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes))
    assert chosen <= {"conv2d"}


@pytest.mark.slow
def test_uneven_padding():
    x, weight, bias = normal(0, 1, 16, 9, 9), normal(1, 16, 16, 3, 3), normal(2, 16)
    actual, _ = evaluate(convolution(weight, bias, padding=(0, 2, 1, 0), strides=(2, 1)), [x])
    padded = np.pad(x, ((0, 0), (0, 0), (0, 1), (2, 0)))
    assert_close(actual, expected(padded, weight, bias, strides=(2, 1)))


def test_residual_is_added_in_the_same_kernel():
    x, weight, bias = normal(0, 1, 32, 28, 28), normal(1, 32, 32, 3, 3), normal(2, 32)
    actual, chosen = evaluate(convolution(weight, bias, padding=(1, 1)), [x, x])
    assert chosen == {"conv2d"}
    assert_close(actual, expected(x, weight, bias, residual=x, padding=(1, 1)))


@pytest.mark.slow
def test_weights_that_are_no_constant():
    x, weight = normal(0, 1, 16, 7, 7), normal(1, 24, 16, 3, 3)

    def graph(builder, data, kernel):
        return builder.emit(relax.op.nn.conv2d(data, kernel, padding=(1, 1)))

    actual, chosen = evaluate(graph, [x, weight])
    exact = (torch.tensor(array.astype("float64")) for array in (x, weight))
    assert_close(actual, torch.nn.functional.conv2d(*exact, padding=1).numpy())
    assert chosen == {"conv2d", "elementwise"}


@pytest.mark.slow
def test_a_residual_larger_than_the_product():
    left, right, residual = normal(0, 1, 12, 20), normal(1, 20, 36), normal(2, 5, 12, 36)

    def graph(builder, a, b, c):
        return builder.emit(relax.op.add(builder.emit(relax.op.matmul(a, b)), c))

    actual, _ = evaluate(graph, [left, right, residual])
    assert_close(actual, left.astype("float64") @ right.astype("float64") + residual)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_dtypes(dtype):
    left, right = (4 * normal(0, 37, 130)).astype(dtype), (4 * normal(1, 130, 50)).astype(dtype)
    actual, chosen = evaluate(lambda builder, a, b: builder.emit(relax.op.matmul(a, b)), [left, right])
    assert actual.dtype == np.dtype(dtype)
    assert chosen == {"matmul"}
    exact = left.astype("float64") @ right.astype("float64")
    assert_close(actual, exact, tolerance=1e-6)
