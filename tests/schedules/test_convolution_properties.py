"""Convolutions of every kind (dense, grouped, depthwise, over one axis), with what follows them, against float64."""

from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional
from tvm import relax

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
from tests.helpers.schedules.schedule_harness import assert_close, evaluate, normal

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


def check(batch, inputs, outputs, groups, shape, epilogue, tolerance=TOLERANCE):
    size, kernel, strides, dilation, before, after = shape
    operator, reference = KINDS[len(size)]
    x, weight = normal(0, batch, inputs, *size), weights(1, outputs, inputs // groups, *kernel)
    bias = normal(2, 1, outputs, *(1 for _ in size))
    padding = [pad for axis in reversed(range(len(size))) for pad in (before[axis], after[axis])]
    product = reference(
        functional.pad(exact(x), padding), exact(weight), stride=strides, dilation=dilation, groups=groups
    )
    residual = normal(3, *product.shape)

    def graph(builder, data, other):
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
        return apply_epilogue(builder, y, bias, other, epilogue)

    actual, chosen = evaluate(graph, [x, residual])
    assert_close(actual, expected_epilogue(product, bias, residual, epilogue), tolerance)
    assert not chosen & {"fallback", "none"}


@settings(max_examples=24)
@given(batch=st.sampled_from([1, 3]), inputs=channels, outputs=channels, shape=shapes(2), epilogue=epilogues())
def test_dense(batch, inputs, outputs, shape, epilogue):
    check(batch, inputs, outputs, 1, shape, epilogue)


@settings(max_examples=24)
@given(
    groups=st.sampled_from([2, 3, 8, 17]),
    inputs=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    outputs=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    shape=shapes(2),
    epilogue=epilogues(),
)
def test_grouped(groups, inputs, outputs, shape, epilogue):
    check(1, groups * inputs, groups * outputs, groups, shape, epilogue)


@settings(max_examples=16)
@given(
    batch=st.sampled_from([1, 3]),
    inputs=channels,
    multiplier=st.sampled_from([1, 1, 2, 3]),
    shape=shapes(2),
    epilogue=epilogues(),
)
def test_depthwise(batch, inputs, multiplier, shape, epilogue):
    check(batch, inputs, inputs * multiplier, inputs, shape, epilogue)


@settings(max_examples=16)
@given(inputs=channels, outputs=channels, grouped=st.booleans(), shape=shapes(1), epilogue=epilogues())
def test_one_axis(inputs, outputs, grouped, shape, epilogue):
    check(2, inputs, inputs if grouped else outputs, inputs if grouped else 1, shape, epilogue)
