"""Softmax, norms, pooling and sums of odd lengths, also of values far from zero, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional
from tvm import relax

from tests.helpers.schedules.emulated_gpu import on_cpu_and_gpu
from tests.helpers.schedules.properties import TOLERANCE, exact
from tests.helpers.schedules.schedule_harness import assert_close, evaluate, normal

extents = st.sampled_from([1, 2, 3, 7, 16, 17, 49, 130])
shapes = st.lists(extents, min_size=2, max_size=4).filter(lambda shape: np.prod(shape) <= 60_000)
offsets = st.sampled_from([0.0, 100.0, -3000.0])


@settings(max_examples=12)
@given(shape=shapes, axis=st.integers(-4, 3), offset=offsets, operator=st.sampled_from(["softmax", "log_softmax"]))
def test_softmax(shape, axis, offset, operator):
    assume(-len(shape) <= axis < len(shape))
    x = 5 * normal(0, *shape) + np.float32(offset)
    actual, chosen = evaluate(lambda builder, data: builder.emit(getattr(relax.op.nn, operator)(data, axis)), [x])
    assert_close(actual, getattr(torch, operator)(exact(x), axis).numpy(), TOLERANCE)
    assert chosen <= {"reduction", "columns", "elementwise"}


@settings(max_examples=10)
@given(shape=shapes, axes=st.integers(1, 3), offset=offsets, operator=st.sampled_from(["layer_norm", "rms_norm"]))
def test_norms_over_trailing_axes(shape, axes, offset, operator):
    assume(axes < len(shape))
    last = shape[-axes:]
    x, gamma, beta = normal(0, *shape) + np.float32(offset), normal(1, *last), normal(2, *last)
    parameters = [gamma, beta] if operator == "layer_norm" else [gamma]

    def graph(builder, data):
        constants = [relax.const(array) for array in parameters]
        return builder.emit(getattr(relax.op.nn, operator)(data, *constants, list(range(-axes, 0)), 1e-5))

    actual, chosen = evaluate(graph, [x])
    reference = getattr(functional, operator)(exact(x), last, *map(exact, parameters), eps=1e-5)
    assert_close(actual, reference.numpy(), TOLERANCE)
    assert chosen <= {"reduction", "elementwise"}


@settings(max_examples=14)
@given(
    batch=st.sampled_from([1, 3]),
    groups=st.sampled_from([1, 2, 3, 17]),
    channels=st.sampled_from([1, 2, 5]),
    size=st.lists(st.sampled_from([1, 7, 13, 16]), min_size=1, max_size=2),
    offset=offsets,
)
def test_group_norm(batch, groups, channels, size, offset):
    shape = (batch, groups * channels, *size)
    # A single value has no variance to be normalised by.
    assume(channels * np.prod(size) > 1)
    x, gamma, beta = normal(0, *shape) + np.float32(offset), normal(1, shape[1]), normal(2, shape[1])

    def graph(builder, data):
        axes = list(range(2, len(shape)))
        return builder.emit(relax.op.nn.group_norm(data, relax.const(gamma), relax.const(beta), groups, 1, axes, 1e-5))

    actual, chosen = evaluate(graph, [x])
    assert_close(actual, functional.group_norm(exact(x), groups, exact(gamma), exact(beta), 1e-5).numpy(), TOLERANCE)
    assert chosen <= {"reduction", "elementwise"}


def test_instance_norm_of_values_far_from_zero():
    x, gamma, beta = normal(0, 2, 17, 13, 7) + 1000, normal(1, 17), normal(2, 17)

    def graph(builder, data):
        return builder.emit(relax.op.nn.instance_norm(data, relax.const(gamma), relax.const(beta), 1, [2, 3], 1e-5))

    actual, chosen = evaluate(graph, [x])
    reference = functional.instance_norm(exact(x), weight=exact(gamma), bias=exact(beta), eps=1e-5)
    assert_close(actual, reference.numpy(), TOLERANCE)
    assert chosen <= {"reduction", "elementwise"}


@on_cpu_and_gpu
@settings(max_examples=14)
@given(
    kind=st.sampled_from(["max", "avg"]),
    channels=st.sampled_from([1, 3, 16, 17, 24]),
    size=st.tuples(*[st.sampled_from([1, 2, 7, 13, 16])] * 2),
    window=st.tuples(*[st.sampled_from([1, 2, 3, 5])] * 2),
    strides=st.tuples(*[st.sampled_from([1, 2, 3])] * 2),
    padded=st.booleans(),
    ceil_mode=st.booleans(),
    count_include_pad=st.booleans(),
    behind_convolution=st.booleans(),
)
def test_pooling(
    evaluate, kind, channels, size, window, strides, padded, ceil_mode, count_include_pad, behind_convolution
):
    padding = tuple(extent // 2 if padded else 0 for extent in window)
    assume(all(length + 2 * pad >= extent for length, pad, extent in zip(size, padding, window, strict=True)))
    x, weight = normal(0, 2, channels, *size), normal(1, channels, channels, 1, 1)
    exact_x = functional.conv2d(exact(x), exact(weight)) if behind_convolution else exact(x)
    if kind == "max":
        reference = functional.max_pool2d(exact_x, window, strides, padding, ceil_mode=ceil_mode)
    else:
        reference = functional.avg_pool2d(exact_x, window, strides, padding, ceil_mode, count_include_pad)

    def graph(builder, data):
        if behind_convolution:
            data = builder.emit(relax.op.nn.conv2d(data, relax.const(weight)))
        operator = relax.op.nn.max_pool2d if kind == "max" else relax.op.nn.avg_pool2d
        keywords = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
        return builder.emit(operator(data, window, strides, padding, **keywords))

    actual, chosen = evaluate(graph, [x])
    # Where ceil_mode would begin a window in the padding, TVM computes it and torch does not: frontends drop it.
    rows, columns = reference.shape[2:]
    assert_close(actual[:, :, :rows, :columns], reference.numpy(), TOLERANCE)
    assert not chosen & {"fallback", "none"}


@on_cpu_and_gpu
@settings(max_examples=12)
@given(
    shape=shapes,
    axes=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    keepdims=st.booleans(),
    operator=st.sampled_from(["sum", "mean", "max", "min", "prod"]),
)
def test_reductions(evaluate, shape, axes, keepdims, operator):
    reduced = tuple(sorted(axis for axis in axes if axis < len(shape)))
    assume(reduced)
    x = normal(0, *shape) if operator != "prod" else 1 + normal(0, *shape) / 100
    actual, _ = evaluate(
        lambda builder, data: builder.emit(getattr(relax.op, operator)(data, list(reduced), keepdims)), [x]
    )
    reference = np.asarray(getattr(np, operator)(x.astype("float64"), axis=reduced, keepdims=keepdims))
    scale = float(np.abs(x.astype("float64")).sum(axis=reduced).max()) if operator == "sum" else 0.0
    assert actual.shape == reference.shape
    assert np.abs(actual - reference).max() <= TOLERANCE * max(scale, np.abs(reference).max(), 1.0)


@pytest.mark.parametrize("operator", ["variance", "std"])
def test_deviations_of_values_far_from_zero(operator):
    x = normal(0, 3, 17, 130) + 1000
    actual, _ = evaluate(lambda builder, data: builder.emit(getattr(relax.op, operator)(data, [-1])), [x])
    reference = getattr(np, {"variance": "var", "std": "std"}[operator])(x.astype("float64"), axis=-1)
    assert_close(actual, reference, TOLERANCE)


def softmax(x, axis):
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def test_masked_softmax_has_zeros_and_no_nan():
    x = normal(0, 5, 40)
    x[:, 20:] = -np.inf
    actual, _ = evaluate(lambda builder, data: builder.emit(relax.op.nn.softmax(data, -1)), [x])
    assert (actual[:, 20:] == 0).all()
    assert_close(actual, softmax(x.astype("float64"), -1))


@pytest.mark.parametrize("axis", [-1, 0])
def test_nan_stays_in_its_own_softmax(axis):
    x = normal(0, 40, 40)
    x[7, 9] = np.nan
    actual, _ = evaluate(lambda builder, data: builder.emit(relax.op.nn.softmax(data, axis)), [x])
    right = softmax(x.astype("float64"), axis)
    assert np.isnan(right).sum() == 40
    assert np.array_equal(np.isnan(actual), np.isnan(right))
    assert_close(actual[~np.isnan(right)], right[~np.isnan(right)])


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("worst", [-np.inf, -128], ids=str)
def test_the_place_of_what_cannot_be_less_is_the_first(worst, axis, keepdims):
    for name, value in (("argmax", worst), ("argmin", -worst - (worst == -128))):
        x = np.full((5, 7), value, "int8" if worst == -128 else "float32")
        x[2, 3] = 0
        graph = getattr(relax.op, name)
        actual, _ = evaluate(lambda builder, data, graph=graph: builder.emit(graph(data, axis, keepdims)), [x])
        assert np.array_equal(actual, getattr(np, name)(x, axis, keepdims=keepdims))


@on_cpu_and_gpu
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_window_of_nothing_but_minus_infinity(evaluate, axes):
    """Padding counts as -inf too; the last window is beyond the data."""
    x = np.full((1, 16, *[9] * axes), -np.inf, "float32")
    x[..., 7:] = normal(0, *x[..., 7:].shape)
    options = {"pool_size": [3] * axes, "strides": [2] * axes, "padding": [1] * (2 * axes), "ceil_mode": True}
    operator = getattr(relax.op.nn, f"max_pool{axes}d")
    actual, _ = evaluate(lambda builder, data: builder.emit(operator(data, **options)), [x])
    expected = getattr(functional, f"max_pool{axes}d")(torch.from_numpy(x), 3, 2, 1, ceil_mode=True)
    assert np.array_equal(actual, expected.numpy())
