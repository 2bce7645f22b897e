"""Grouped convolutions whose groups fill no vector: which way is chosen, and that the values stay."""

import pytest
from tvm import relax

from schedules.cpu.narrow_groups import Widening, choose_widening
from schedules.traits import Traits
from tests.helpers.schedules.convolutions import convolution, expected
from tests.helpers.schedules.schedule_harness import assert_close, evaluate, normal

AVX512 = Traits(lanes=16, registers=32)


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs", "width", "widening"),
    [
        (32, 4, 4, 56, Widening(merged=2)),
        (3, 80, 20, 28, Widening(merged=3)),
        (3, 20, 80, 28, Widening(merged=3)),
        (3, 80, 80, 28, None),
        (65, 2, 2, 28, Widening(merged=4, added=3)),
        (130, 1, 1, 28, Widening(added=6)),
        (64, 1, 1, 28, None),
        (64, 1, 4, 28, Widening(repeats=True)),
        (64, 1, 4, 56, None),
        (3, 1, 32, 56, Widening(merged=3)),
    ],
)
def test_the_cheapest_way(groups, inputs, outputs, width, widening):
    assert choose_widening(groups, inputs, outputs, width, AVX512) == widening


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


def test_weights_that_are_no_constant_stay_grouped():
    x, weight = normal(0, 1, 8, 5, 5), normal(1, 8, 4, 1, 1)
    actual, _ = evaluate(lambda builder, *both: builder.emit(relax.op.nn.conv2d(*both, groups=2)), [x, weight])
    assert_close(actual[:, :4], (weight[:4, :, 0, 0].astype("float64") @ x[0, :4].reshape(4, -1)).reshape(1, 4, 5, 5))
