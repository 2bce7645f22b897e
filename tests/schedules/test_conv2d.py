"""Convolutions of every kind (dense, grouped, depthwise, over one axis), with what follows them, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional
from tvm import relax, tirx

import schedules
from tests.helpers.schedules.convolutions import convolution, expected
from tests.helpers.schedules.emulated_gpu import on_cpu_and_gpu
from tests.helpers.schedules.properties import (
    TOLERANCE,
    apply_epilogue,
    channels,
    epilogues,
    exact,
    expected_epilogue,
    lengths,
    weights,
    windows,
)
from tests.helpers.schedules.schedule_harness import (
    HOST,
    assert_close,
    evaluate,
    graph_of,
    lower,
    nodes,
    normal,
    rules,
    run,
)

KINDS = {1: (relax.op.nn.conv1d, functional.conv1d), 2: (relax.op.nn.conv2d, functional.conv2d)}
pads = st.sampled_from([0, 0, 1, 2, 3])
steps = st.sampled_from([1, 1, 2, 3])


@st.composite
def shapes(draw, dimensions):
    """Size, kernel, strides, dilation, and padding before and after, of each axis, such that there is a result."""
    size, kernel, strides, dilation, before, after = (
        tuple(draw(strategy) for _ in range(dimensions)) for strategy in (lengths, windows, steps, steps, pads, pads)
    )
    for axis in range(dimensions):
        assume(dilation[axis] * (kernel[axis] - 1) < size[axis] + before[axis] + after[axis])
    return size, kernel, strides, dilation, before, after


def check(evaluate, batch, inputs, outputs, groups, shape, epilogue, tolerance=TOLERANCE):
    size, kernel, strides, dilation, before, after = shape
    operator, reference = KINDS[len(size)]
    x, weight = normal(0, batch, inputs, *size), weights(1, outputs, inputs // groups, *kernel)
    bias = normal(2, 1, outputs, *(1 for _ in size))
    padding = [pad for axis in reversed(range(len(size))) for pad in (before[axis], after[axis])]
    product = reference(
        functional.pad(exact(x), padding), exact(weight), stride=strides, dilation=dilation, groups=groups
    )
    residual = normal(3, *product.shape)

    def graph(builder, data, residual_input):
        y = builder.emit(
            operator(
                data,
                relax.const(weight),
                strides=list(strides),
                padding=[*before, *after],
                dilation=list(dilation),
                groups=groups,
            )
        )
        return apply_epilogue(builder, y, bias, residual_input, epilogue)

    actual, chosen = evaluate(graph, [x, residual])
    assert_close(actual, expected_epilogue(product, bias, residual, epilogue), tolerance)
    assert not chosen & {"fallback", "none"}


@on_cpu_and_gpu
@settings(max_examples=10)
@given(batch=st.sampled_from([1, 3]), inputs=channels, outputs=channels, shape=shapes(2), epilogue=epilogues())
def test_dense(evaluate, batch, inputs, outputs, shape, epilogue):
    check(evaluate, batch, inputs, outputs, 1, shape, epilogue)


@settings(max_examples=10)
@given(
    groups=st.sampled_from([2, 3, 8, 17]),
    inputs=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    outputs=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    shape=shapes(2),
    epilogue=epilogues(),
)
def test_grouped(groups, inputs, outputs, shape, epilogue):
    check(evaluate, 1, groups * inputs, groups * outputs, groups, shape, epilogue)


@settings(max_examples=8)
@given(
    batch=st.sampled_from([1, 3]),
    inputs=channels,
    multiplier=st.sampled_from([1, 1, 2, 3]),
    shape=shapes(2),
    epilogue=epilogues(),
)
def test_depthwise(batch, inputs, multiplier, shape, epilogue):
    check(evaluate, batch, inputs, inputs * multiplier, inputs, shape, epilogue)


@settings(max_examples=10)
@given(inputs=channels, outputs=channels, grouped=st.booleans(), shape=shapes(1), epilogue=epilogues())
def test_one_axis(inputs, outputs, grouped, shape, epilogue):
    check(evaluate, 2, inputs, inputs if grouped else outputs, inputs if grouped else 1, shape, epilogue)


TRANSPOSED = {
    1: (relax.op.nn.conv1d_transpose, functional.conv_transpose1d),
    2: (relax.op.nn.conv2d_transpose, functional.conv_transpose2d),
}


@settings(max_examples=12)
@given(data=st.data(), axes=st.sampled_from([1, 2, 2]), groups=st.sampled_from([1, 1, 2, 5]), epilogue=epilogues())
def test_transposed(data, axes, groups, epilogue):
    def draw(strategy):
        return [data.draw(strategy) for _ in range(axes)]

    inputs, outputs = (groups * data.draw(st.sampled_from([1, 3, 16])) for _ in range(2))
    size, kernel, strides, before, after, more = map(
        draw, (lengths, windows, st.sampled_from([1, 2, 3, 4]), pads, pads, st.sampled_from([0, 0, 1, 2, 3]))
    )
    more = [min(length, stride - 1) for length, stride in zip(more, strides, strict=True)]
    x, weight = normal(0, 2, inputs, *size), weights(1, inputs, outputs // groups, *kernel)
    operator, reference = TRANSPOSED[axes]
    uncropped = reference(exact(x), exact(weight), stride=strides, output_padding=more, groups=groups)
    kept = [slice(a, whole - b) for a, whole, b in zip(before, uncropped.shape[2:], after, strict=True)]
    product = uncropped[..., *kept]
    assume(product.numel())
    bias, residual = normal(2, 1, outputs, *(1 for _ in size)), normal(3, *product.shape)

    def graph(builder, image, residual_input):
        attributes = {"strides": strides, "padding": [*before, *after], "output_padding": more, "groups": groups}
        y = builder.emit(operator(image, relax.const(weight), **attributes))
        return apply_epilogue(builder, y, bias, residual_input, epilogue)

    actual, chosen = evaluate(graph, [x, residual])
    assert_close(actual, expected_epilogue(product, bias, residual, epilogue), TOLERANCE)
    assert not chosen & {"fallback", "none", "pooling" if groups == 1 else ""}


@on_cpu_and_gpu
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "kernel", "residual"),
    [
        (512, 64, 7, 3, False),  # weights in chunks
        (32, 255, 13, 1, False),  # channels that no block divides are padded
        (32, 32, 9, 3, True),  # added in the same kernel
    ],
)
def test_kernels_with_bias_and_activation(evaluate, inputs, outputs, size, kernel, residual):
    x, weight, bias = normal(0, 1, inputs, size, size), normal(1, outputs, inputs, kernel, kernel), normal(2, outputs)
    attributes = {"padding": (kernel // 2, kernel // 2)}
    actual, chosen = evaluate(convolution(weight / 60, bias, **attributes), [x, x] if residual else [x])
    assert {"conv2d"} <= chosen <= {"conv2d", "elementwise"}
    assert_close(actual, expected(x, weight / 60, bias, residual=x if residual else 0, **attributes))


def test_half_precision_accumulates_in_single():
    x, weight = normal(0, 1, 64, 7, 7, dtype="float16"), normal(1, 32, 64, 3, 3, dtype="float16")
    bias = normal(2, 32, dtype="float16")
    attributes = {"padding": (1, 1)}
    actual, _ = evaluate(convolution(weight, bias, out_dtype="float16", **attributes), [x])
    assert actual.dtype == np.float16
    assert_close(actual, expected(x, weight, bias, **attributes), tolerance=2e-3)


@on_cpu_and_gpu
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "kernel", "groups"),
    [(16, 16, (7, 7), (3, 3), 1), (8, 8, (5, 5), (1, 1), 2), (16, 8, (9,), (3,), 1)],
)
def test_weights_that_are_no_constant(evaluate, inputs, outputs, size, kernel, groups):
    operator, reference = KINDS[len(size)]
    x, weight = normal(0, 1, inputs, *size), normal(1, outputs, inputs // groups, *kernel)
    actual, _ = evaluate(lambda builder, *both: builder.emit(operator(*both, padding=1, groups=groups)), [x, weight])
    assert_close(actual, reference(exact(x), exact(weight), padding=1, groups=groups).numpy())


@pytest.mark.parametrize("axes", [1, 2])
def test_a_result_with_a_number_that_is_computed_from_it(axes):
    """The convolution's result is stored in blocks, the number is not."""
    operator, reference = KINDS[axes]
    x, weight = normal(0, 1, 64, *[6] * axes), normal(1, 32, 64, *[1] * axes)

    def graph(builder, data):
        y = builder.emit(operator(data, relax.const(weight)))
        return builder.emit(relax.op.subtract(y, builder.emit(relax.op.mean(y))))

    actual, _ = evaluate(graph, [x])
    y = reference(exact(x), exact(weight))
    assert_close(actual, (y - y.mean()).numpy(), TOLERANCE)


def squeezed(size):
    """A squeeze-and-excite block behind a convolution, its input of ``size`` x ``size`` pixels, and the answer."""
    first, second, x = normal(1, 48, 8, 1, 1), normal(2, 48, 48, 1, 1), normal(3, 1, 8, size, size)

    def graph(builder, data):
        image = builder.emit(relax.op.nn.conv2d(data, relax.const(first)))
        mean = builder.emit(relax.op.mean(image, axis=[2, 3], keepdims=True))
        gate = builder.emit(relax.op.sigmoid(builder.emit(relax.op.nn.conv2d(mean, relax.const(second)))))
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.multiply(image, gate))))

    x_, first_, second_ = (torch.tensor(array).double() for array in (x, first, second))
    image = torch.nn.functional.conv2d(x_, first_)
    gate = torch.sigmoid(torch.nn.functional.conv2d(image.mean((2, 3), keepdim=True), second_))
    return graph, [x], (image * gate).relu().numpy()


def test_a_tile_ends_where_one_value_is_spread_over_an_image():
    """The image's pixels are no part of the gate's tile: they would be unrolled with it, 3136 of 56 x 56."""
    unrolled = {}
    for size in (7, 14):
        graph, inputs, right = squeezed(size)
        lowered = lower(graph_of(graph, inputs), HOST)
        assert_close(run(lowered, inputs), right)
        loops = [loop for loop in nodes(lowered, tirx.For) if loop.kind == tirx.ForKind.UNROLLED]
        unrolled[size] = sorted(int(loop.extent) for loop in loops)
    assert len(unrolled[14]) == len(unrolled[7])
    assert max(unrolled[14]) < 14


@pytest.mark.parametrize("activation", ["nn.gelu", "tanh"])
def test_what_reads_a_value_often_does_not_compute_it_as_often(activation):
    """Each polynomial reads its operand some sixty times: three of them in one expression are 200 000 terms."""
    weight = normal(1, 16, 16, 1, 1)
    name = activation.removeprefix("nn.")
    operator = getattr(relax.op.nn if "." in activation else relax.op, name)

    def graph(builder, x):
        y = builder.emit(relax.op.nn.conv2d(x, relax.const(weight)))
        for _ in range(3):
            y = builder.emit(operator(y))
        return y

    x = normal(0, 1, 16, 5, 7)
    lowered = lower(graph_of(graph, [x]), HOST)
    assert "conv2d" in rules(lowered)
    assert len(nodes(lowered)) < 20_000
    right = torch.nn.functional.conv2d(torch.tensor(x).double(), torch.tensor(weight).double())
    for _ in range(3):
        right = getattr(torch.nn.functional, name)(right)
    assert_close(run(lowered, [x]), right.numpy())


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs"),
    [(8, 4, 4), (3, 16, 5), (3, 5, 16), (9, 2, 2), (5, 4, 8), (17, 1, 1), (13, 1, 3), (6, 1, 4), (3, 1, 32)],
)
def test_widened_groups_compute_the_same(groups, inputs, outputs):
    x, weight = normal(0, 2, groups * inputs, 7, 9), normal(1, groups * outputs, inputs, 3, 3)
    bias, attributes = normal(2, groups * outputs), {"padding": (1, 1), "strides": (2, 1), "groups": groups}
    actual, chosen = evaluate(convolution(weight, bias, **attributes), [x])
    assert_close(actual, expected(x, weight, bias, **attributes), tolerance=1e-5)
    assert chosen <= {"conv2d", "depthwise_conv2d", "elementwise"}, "no plain loops"


def two_layers(first, second, bias):
    def graph(builder, x):
        y = builder.emit(relax.op.nn.conv1d(x, relax.const(first), strides=2, padding=(2, 1)))
        y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(y, relax.const(bias)))))
        z = builder.emit(relax.op.nn.conv1d(y, relax.const(second), dilation=2, padding=2))
        z = builder.emit(relax.op.add(z, y))
        return builder.emit(relax.op.nn.max_pool1d(z, pool_size=3, strides=2, padding=1))

    return graph


def test_a_chain_over_one_axis_stays_in_blocks_and_is_fused():
    x, layers = normal(0, 2, 16, 33), (normal(1, 32, 16, 4), normal(2, 32, 32, 3) / 8, normal(3, 1, 32, 1))
    lowered = lower(graph_of(two_layers(*layers), [x]), HOST)
    first, second, bias, exact_x = map(exact, (*layers, x))
    y = torch.relu(functional.conv1d(functional.pad(exact_x, (2, 1)), first, stride=2) + bias)
    z = functional.conv1d(y, second, dilation=2, padding=2) + y
    assert_close(run(lowered, [x]), functional.max_pool1d(z, 3, 2, 1).numpy(), TOLERANCE)
    assert rules(lowered) <= {"conv2d", "elementwise", "pooling"}
    kernels = schedules.chosen_rules(lowered)
    assert {"fused_conv2d_add_relu", "fused_conv2d1_add1"} <= set(kernels)
    assert sum("layout_transform" in name for name in kernels) == 2, "one at the input, one at the output"


@pytest.mark.parametrize("per_channel", [False, True])
def test_roundings_to_integers_between_convolutions_stay_in_blocks(per_channel):
    """All values are whole or end in a quarter, so that the result is exact; scales along an axis need plain layout."""
    generator = np.random.default_rng(0)
    x, *layers = (
        generator.integers(-3, 4, shape).astype("float32") for shape in ((1, 16, 6, 6), *[(16, 16, 3, 3)] * 2)
    )
    scale = 4 * 2.0 ** (np.arange(16) % 3 if per_channel else 0)
    numbers = [relax.const(np.float32(scale)), relax.const(np.full_like(scale, 3, "int8"))]

    def graph(builder, x):
        y = builder.emit(relax.op.add(relax.op.nn.conv2d(x, relax.const(layers[0])), relax.const(np.float32(0.25))))
        y = builder.emit(relax.op.quantize(y, *numbers, axis=1, out_dtype="int8"))
        y = builder.emit(relax.op.dequantize(y, *numbers, axis=1, out_dtype="float32"))
        return builder.emit(relax.op.nn.conv2d(y, relax.const(layers[1])))

    lowered = lower(graph_of(graph, [x]), HOST)
    y = functional.conv2d(torch.tensor(x), torch.tensor(layers[0])).numpy() + 0.25
    step = np.reshape(scale, (-1, 1, 1))
    rounded = (np.clip(np.round(y / step) + 3, -128, 127) - 3) * step
    right = functional.conv2d(torch.tensor(rounded).double(), torch.tensor(layers[1]).double())
    np.testing.assert_array_equal(run(lowered, [x]), right.numpy())
    assert per_channel or "fused_conv2d_add_quantize_dequantize" in schedules.chosen_rules(lowered)
