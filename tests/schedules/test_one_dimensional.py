"""Convolutions over one axis run on the template for images, with what follows them in the same kernel."""

import numpy as np
import pytest
import torch
from tvm import relax

import schedules
from tests.helpers.schedules.schedule_harness import HOST, assert_close, evaluate, graph_of, lower, normal, run


def two_layers(first, second, bias):
    def graph(builder, x):
        y = builder.emit(relax.op.nn.conv1d(x, relax.const(first), strides=2, padding=(2, 1)))
        y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(y, relax.const(bias)))))
        z = builder.emit(relax.op.nn.conv1d(y, relax.const(second), dilation=2, padding=2))
        z = builder.emit(relax.op.add(z, y))
        return builder.emit(relax.op.nn.max_pool1d(z, pool_size=3, strides=2, padding=1))

    return graph


@pytest.fixture
def layers():
    return normal(1, 32, 16, 4), normal(2, 32, 32, 3) / 8, normal(3, 1, 32, 1)


def test_values_of_a_chain(layers):
    x = normal(0, 2, 16, 33)
    actual, chosen = evaluate(two_layers(*layers), [x])
    first, second, bias, exact = (torch.tensor(array.astype("float64")) for array in (*layers, x))
    y = torch.relu(torch.nn.functional.conv1d(torch.nn.functional.pad(exact, (2, 1)), first, stride=2) + bias)
    z = torch.nn.functional.conv1d(y, second, dilation=2, padding=2) + y
    assert_close(actual, torch.nn.functional.max_pool1d(z, 3, 2, 1).numpy(), tolerance=1e-5)
    assert chosen <= {"conv2d", "elementwise", "pooling"}


def test_a_chain_stays_in_blocks_and_is_fused(layers):
    lowered = lower(graph_of(two_layers(*layers), [normal(0, 2, 16, 33)]), HOST)
    kernels = schedules.chosen_rules(lowered)
    assert {"fused_conv2d_add_relu", "fused_conv2d1_add1"} <= set(kernels)
    assert sum("layout_transform" in name for name in kernels) == 2, "one at the input, one at the output"


def test_an_operand_from_outside_gets_the_height_too():
    x, weight, other = normal(0, 1, 16, 9), normal(1, 16, 16, 3), normal(2, 1, 16, 9)

    def graph(builder, data, residual):
        y = builder.emit(relax.op.nn.conv1d(data, relax.const(weight), padding=1))
        return builder.emit(relax.op.multiply(builder.emit(relax.op.add(residual, y)), relax.const(np.float32(2))))

    lowered = lower(graph_of(graph, [x, other]), HOST)
    exact = torch.nn.functional.conv1d(*(torch.tensor(array.astype("float64")) for array in (x, weight)), padding=1)
    assert_close(run(lowered, [x, other]), 2 * (exact.numpy() + other), tolerance=1e-5)


def test_weights_that_are_no_constant():
    x, weight = normal(0, 1, 16, 9), normal(1, 8, 16, 3)
    actual, _ = evaluate(lambda builder, *both: builder.emit(relax.op.nn.conv1d(*both)), [x, weight])
    exact = (torch.tensor(array.astype("float64")) for array in (x, weight))
    assert_close(actual, torch.nn.functional.conv1d(*exact).numpy())
