"""Winograd convolutions against torch in float64, and when they are chosen."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tvm import relax

import schedules
from schedules.cpu import winograd
from schedules.cpu.winograd_cost import Winograd
from schedules.cpu.winograd_matrices import input_matrix, output_matrix, weight_matrix
from tests.helpers.schedules.convolutions import convolution, expected
from tests.helpers.schedules.properties import TOLERANCE
from tests.helpers.schedules.schedule_harness import HOST, assert_close, evaluate, graph_of, lower, normal, rules, run


@pytest.mark.parametrize("outputs", [2, 4])
def test_products_of_transforms_are_the_convolution(outputs):
    signal, taps = normal(0, outputs + 2, dtype="float64"), normal(1, 3, dtype="float64")
    products = (input_matrix(outputs) @ signal) * (weight_matrix(outputs) @ taps)
    assert np.allclose(output_matrix(outputs) @ products, np.correlate(signal, taps), rtol=0, atol=1e-12)


@settings(max_examples=14)
@given(
    channels=st.tuples(st.sampled_from([8, 16, 24, 48]), st.sampled_from([8, 16, 24, 64])),
    size=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    batch=st.integers(1, 2),
    outputs=st.sampled_from([2, 4]),
    staged=st.booleans(),
    group=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    residual=st.booleans(),
)
def test_every_size_padding_and_structure(channels, size, padding, batch, outputs, staged, group, residual):
    size = tuple(max(extent, 3 - padding[axis] - padding[axis + 2]) for axis, extent in enumerate(size))
    height, width = (extent + padding[axis] + padding[axis + 2] - 2 for axis, extent in enumerate(size))
    tiles = -(-height // outputs), -(-width // outputs)
    group = tiles if staged else tuple(min(pair) for pair in zip(group, tiles, strict=True))
    x, weight, bias = normal(0, batch, channels[0], *size), normal(1, *reversed(channels), 3, 3), normal(2, channels[1])
    added = [normal(3, batch, channels[1], height, width)] if residual else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "choose_winograd", lambda *_: Winograd(outputs, *group, staged))
        actual, chosen = evaluate(convolution(weight, bias, padding=padding), [x, *added])
    top, left, bottom, right = padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    assert_close(actual, expected(padded, weight, bias, residual=sum(added)), TOLERANCE)
    assert "winograd" in chosen


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
    ("dtype", "attributes", "is_chosen"),
    [
        ("float32", {}, True), ("float32", {"padding": (2, 2)}, True), ("float32", {"strides": (2, 2)}, False),
        ("float32", {"dilation": (2, 2)}, False), ("float32", {"groups": 2}, False),
        ("float16", {"out_dtype": "float16"}, False),
    ],
)  # fmt: skip
def test_other_convolutions_stay_direct(dtype, attributes, is_chosen):
    shapes = (1, 64, 56, 56), (64, 64 // attributes.get("groups", 1), 3, 3), (64,)
    x, weight, bias = (normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    assert ("winograd" in rules(lower(graph_of(convolution(weight, bias, **attributes), [x]), HOST))) == is_chosen


def test_weights_that_are_no_constant_stay_direct():
    def graph(builder, data, kernel):
        return builder.emit(relax.op.nn.conv2d(data, kernel, padding=(1, 1)))

    module = graph_of(graph, [normal(0, 1, 64, 56, 56), normal(1, 64, 64, 3, 3)])
    assert "winograd" not in rules(lower(module, HOST))
