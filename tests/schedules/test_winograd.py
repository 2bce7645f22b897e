"""Winograd convolutions against torch in float64, and when they are chosen."""

import numpy as np
import pytest
import tvm
from hypothesis import given, settings, strategies as st
from tvm import relax, te, tirx

import schedules
from schedules.cpu.winograd.lowering import Winograd, winograd_conv2d
from schedules.cpu.winograd.schedule import schedule_winograd
from schedules.cpu.winograd.transform import (
    input_matrix,
    output_matrix,
    transformed_kernel,
    weight_matrix,
)
from schedules.traits import traits_of
from tests.helpers.schedules.convolutions import convolution, expected
from tests.helpers.schedules.schedule_harness import (
    HOST,
    QUICK_HOST,
    assert_close,
    evaluate,
    graph_of,
    lower,
    normal,
    rules,
    run,
)

TOLERANCE = 1e-5


@pytest.mark.parametrize("outputs", [2, 4])
def test_products_of_transforms_are_the_convolution(outputs):
    signal, taps = normal(0, outputs + 2, dtype="float64"), normal(1, 3, dtype="float64")
    products = (input_matrix(outputs) @ signal) * (weight_matrix(outputs) @ taps)
    assert np.allclose(output_matrix(outputs) @ products, np.correlate(signal, taps), rtol=0, atol=1e-12)


@settings(max_examples=14, derandomize=True)
@given(
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    lanes=st.tuples(st.sampled_from([8, 16]), st.sampled_from([8, 16])),
    size=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    batch=st.integers(1, 2),
    outputs=st.sampled_from([2, 4]),
    staged=st.booleans(),
    group=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    residual=st.booleans(),
)
def test_every_size_padding_and_structure(blocks, lanes, size, padding, batch, outputs, staged, group, residual):
    size = tuple(max(extent, 3 - padding[axis] - padding[axis + 2]) for axis, extent in enumerate(size))
    height, width = (extent + padding[axis] + padding[axis + 2] - 2 for axis, extent in enumerate(size))
    tiles = -(-height // outputs), -(-width // outputs)
    group = tiles if staged else tuple(min(pair) for pair in zip(group, tiles, strict=True))
    inputs, outs = blocks[0] * lanes[0], blocks[1] * lanes[1]
    x, weight, bias = normal(0, batch, inputs, *size), normal(1, outs, inputs, 3, 3), normal(2, outs)
    added = normal(3, batch, outs, height, width) if residual else None
    actual = _run_kernel(x, weight, bias, added, lanes, padding, Winograd(outputs, *group, staged))
    top, left, bottom, right = padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    assert_close(actual, expected(padded, weight, bias, residual=0.0 if added is None else added), TOLERANCE)


def _run_kernel(x, weight, bias, residual, lanes, padding, choice):
    """The scheduled kernel with bias, residual and ReLU in it, on blocked copies of plain arrays."""
    traits = traits_of(HOST)
    data, kernel = _blocked(x, lanes[0]), transformed_kernel(_blocked_kernel(weight, *lanes), choice.outputs)
    arrays = [data, kernel, _blocked(bias.reshape(1, -1, 1, 1), lanes[1])]
    if residual is not None:
        arrays.append(_blocked(residual, lanes[1]))
    tensors = [te.placeholder(array.shape, "float32", name=f"input_{place}") for place, array in enumerate(arrays)]
    result = winograd_conv2d(tensors[0], tensors[1], list(padding), choice, traits)
    shape = tuple(int(extent) for extent in result.shape)
    epilogue = te.compute(shape, lambda n, o, h, w, lane: result[n, o, h, w, lane] + tensors[2][0, o, 0, 0, lane])
    if residual is not None:
        biased = epilogue
        epilogue = te.compute(shape, lambda *index: biased[index] + tensors[3][index])
    activated = te.compute(shape, lambda *index: tirx.max(epilogue[index], tirx.const(0, "float32")))
    scheduled = schedule_winograd(te.create_prim_func([*tensors, activated]), traits)
    output = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    tvm.compile(tvm.IRModule({"main": scheduled}), QUICK_HOST)(*(tvm.runtime.tensor(array) for array in arrays), output)
    return output.numpy().transpose(0, 1, 4, 2, 3).reshape(shape[0], -1, *shape[2:4])


def _blocked(array, lanes):
    batch, channels, height, width = array.shape
    split = array.reshape(batch, channels // lanes, lanes, height, width)
    return np.ascontiguousarray(split.transpose(0, 1, 3, 4, 2))


def _blocked_kernel(kernel, input_lanes, output_lanes):
    outputs, inputs = kernel.shape[:2]
    split = kernel.reshape(outputs // output_lanes, output_lanes, inputs // input_lanes, input_lanes, 3, 3)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 5, 3, 1))


@settings(max_examples=5, derandomize=True)
@given(
    inputs=st.sampled_from([64, 72, 96]),
    outputs=st.sampled_from([64, 100, 136]),
    size=st.tuples(st.sampled_from([27, 30]), st.sampled_from([25, 32])),
    padding=st.sampled_from([0, 1, 2]),
    batch=st.sampled_from([1, 2]),
)
def test_in_a_network(inputs, outputs, size, padding, batch):
    x, weight = normal(0, batch, inputs, *size), normal(1, outputs, inputs, 3, 3)
    bias = normal(2, outputs)
    actual, chosen = evaluate(convolution(weight, bias, padding=(padding, padding)), [x])
    assert "winograd" in chosen
    assert_close(actual, expected(x, weight, bias, padding=padding), TOLERANCE)


def test_bias_residual_and_relu_stay_in_the_kernel():
    x, weight, bias = normal(0, 1, 64, 28, 28), normal(1, 64, 64, 3, 3), normal(2, 64)
    layer = convolution(weight, bias, padding=(1, 1))

    def graph(builder, *inputs):
        return builder.emit(relax.op.negative(layer(builder, *inputs)))

    lowered = lower(graph_of(graph, [x, x]), HOST)
    kernels = schedules.chosen_rules(lowered)
    (kernel,) = [name for name, rule in kernels.items() if rule == "winograd"]
    assert kernel.endswith("_add_add1_relu")
    # What is left is changes of layout and the function's last operator, which works on the plain layout.
    assert {rule for name, rule in kernels.items() if name != kernel} == {"elementwise"}
    assert_close(-run(lowered, [x, x]), expected(x, weight, bias, residual=x, padding=1), TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "attributes"),
    [
        ("float32", {"strides": (2, 2)}), ("float32", {"dilation": (2, 2)}), ("float32", {"groups": 2}),
        ("float16", {"out_dtype": "float16"}),
    ],
)  # fmt: skip
def test_other_convolutions_stay_direct(dtype, attributes):
    shapes = (1, 64, 56, 56), (64, 64 // attributes.get("groups", 1), 3, 3), (64,)
    x, weight, bias = (normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    assert "winograd" not in rules(lower(graph_of(convolution(weight, bias, **attributes), [x]), HOST))


def test_weights_that_are_no_constant_stay_direct():
    def graph(builder, data, kernel):
        return builder.emit(relax.op.nn.conv2d(data, kernel, padding=(1, 1)))

    module = graph_of(graph, [normal(0, 1, 64, 56, 56), normal(1, 64, 64, 3, 3)])
    assert "winograd" not in rules(lower(module, HOST))
