"""Softmax, norms, means, windows against numpy and torch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tvm import relax

from tests.helpers.schedules.schedule_harness import assert_close, evaluate, normal

extents = st.sampled_from([1, 3, 7, 17, 32, 130])


def softmax(x, axis):
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


@settings(max_examples=8, derandomize=True)
@given(outer=st.lists(extents, min_size=1, max_size=2), last=extents, axis=st.sampled_from([-1, -1, 0]))
def test_softmax(outer, last, axis):
    x = 3 * normal(0, *outer, last)
    actual, chosen = evaluate(lambda builder, data: builder.emit(relax.op.nn.softmax(data, axis)), [x])
    assert_close(actual, softmax(x.astype("float64"), axis))
    assert chosen == {"reduction"} if axis == -1 else chosen <= {"columns", "reduction", "elementwise"}


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


@settings(max_examples=6, derandomize=True)
@given(outer=st.lists(extents, min_size=1, max_size=2), last=extents)
def test_layer_norm_of_values_far_from_zero(outer, last):
    x, gamma, beta = normal(0, *outer, last) + 100, normal(1, last), normal(2, last)

    def graph(builder, data):
        return builder.emit(
            relax.op.nn.layer_norm(data, relax.const(gamma), relax.const(beta), axes=[-1], epsilon=1e-5)
        )

    actual, chosen = evaluate(graph, [x])
    exact = x.astype("float64")
    centred = exact - exact.mean(-1, keepdims=True)
    reference = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    # Inputs of 100 carry errors of 4e-6 themselves, which the division by a small deviation magnifies.
    assert_close(actual, reference, tolerance=1e-3)
    assert chosen == {"reduction"}


@pytest.mark.parametrize("axes", [[0], [1], [-1], [2, 3], [1, 2, 3], None])
@pytest.mark.parametrize("operator", ["sum", "mean", "max"])
def test_reductions_over_any_axes(operator, axes):
    x = normal(0, 3, 17, 5, 7)
    actual, _ = evaluate(lambda builder, data: builder.emit(getattr(relax.op, operator)(data, axes)), [x])
    reference = getattr(np, operator)(x.astype("float64"), axis=None if axes is None else tuple(axes))
    assert_close(actual, np.asarray(reference))


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


@settings(max_examples=6, derandomize=True)
@given(
    channels=st.sampled_from([3, 16, 17]),
    size=st.sampled_from([7, 13]),
    window=st.sampled_from([2, 3]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    kind=st.sampled_from(["max", "avg"]),
)
def test_pooling(channels, size, window, stride, padding, kind):
    x = normal(0, 3, channels, size, size)
    operator = relax.op.nn.max_pool2d if kind == "max" else relax.op.nn.avg_pool2d
    pool = (window, window), (stride, stride), (padding, padding)
    actual, chosen = evaluate(lambda builder, data: builder.emit(operator(data, *pool)), [x])
    exact = torch.tensor(x.astype("float64"))
    if kind == "max":
        reference = torch.nn.functional.max_pool2d(exact, window, stride, padding)
    else:
        reference = torch.nn.functional.avg_pool2d(exact, window, stride, padding, count_include_pad=False)
    assert_close(actual, reference.numpy())
    assert "fallback" not in chosen


def test_global_average_and_the_layer_behind_it():
    x, weight = normal(0, 2, 32, 7, 7), normal(1, 32, 10)

    def graph(builder, data):
        mean = builder.emit(relax.op.nn.adaptive_avg_pool2d(data, (1, 1)))
        return builder.emit(relax.op.matmul(builder.emit(relax.op.reshape(mean, (2, 32))), relax.const(weight)))

    actual, chosen = evaluate(graph, [x])
    assert_close(actual, x.astype("float64").mean((2, 3)) @ weight)
    assert "fallback" not in chosen
