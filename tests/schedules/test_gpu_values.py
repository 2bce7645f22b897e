"""All but products for CUDA against numpy in float64: their source, run on a CPU with barriers.

`make test` runs one case per rule; the others are slow, because each compiles C++.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.nn import functional
from tvm import relax

from tests.helpers.schedules.emulated_gpu import evaluate
from tests.helpers.schedules.gpu_kernels import HALVES, needs_headers, slow
from tests.helpers.schedules.properties import exact
from tests.helpers.schedules.schedule_harness import assert_close, normal

pytestmark = needs_headers


def chain(*operators):
    def graph(builder, *inputs):
        result = builder.emit(operators[0](*inputs))
        for operator in operators[1:]:
            result = builder.emit(operator(result))
        return result

    return graph


def layer_norm(data, extent):
    weights = (relax.const(normal(seed, extent)) for seed in (1, 2))
    return relax.op.nn.layer_norm(data, *weights, axes=[-1], epsilon=1e-5)


def normed(x):
    weights = (exact(normal(seed, x.shape[-1])) for seed in (1, 2))
    return torch.softmax(functional.layer_norm(exact(x), x.shape[-1:], *weights, 1e-5), -1).numpy()


def pooled(kind, window, stride, padding):
    sizes = (window, window), (stride, stride), (padding, padding)
    if kind == "max":
        return chain(lambda x: relax.op.nn.max_pool2d(x, *sizes)), lambda x: functional.max_pool2d(
            exact(x), window, stride, padding
        ).numpy()
    return chain(lambda x: relax.op.nn.avg_pool2d(x, *sizes)), lambda x: functional.avg_pool2d(
        exact(x), window, stride, padding, count_include_pad=False
    ).numpy()


def turned(axes):
    moved = lambda x: x.transpose(axes)  # noqa: E731
    twice = chain(lambda x: relax.op.permute_dims(x, axes), lambda x: relax.op.concat([x, x], axis=1))
    return twice, lambda x: np.concatenate([moved(x), moved(x)], axis=1)


def scaled(x):
    y = x.astype("float64") * normal(1, x.shape[-1])
    return y + np.exp(y)


def gated(x):
    return x / (1 + np.exp(-x)) - np.log(x) / 2


SHARED = {"general_reduction", "reduction", "whole_reduction", "elementwise"}
ONE = {"elementwise"}
NORMED = chain(lambda x: layer_norm(x, 130), lambda x: relax.op.nn.softmax(x, -1))
SCALED = chain(lambda x: relax.op.multiply(x, relax.const(normal(1, 700))), lambda x: relax.op.add(x, relax.op.exp(x)))
SILU = chain(lambda x: relax.op.add(relax.op.nn.silu(x), relax.op.log(relax.op.rsqrt(x))))
SPREAD = (chain(lambda x: relax.op.subtract(x, relax.op.mean(x))), lambda x: x - x.mean())
MEANS = {axes: (chain(lambda x, axes=axes: relax.op.mean(x, axes), relax.op.nn.relu),
                lambda x, axes=axes: np.maximum(x.mean(axes), 0))
         for axes in ((2, 3), (1,), (0, 1, 2, 3))}  # fmt: skip
SCALARS = (
    (chain(relax.op.mean), np.mean),
    (
        chain(relax.op.mean, relax.op.nn.relu, lambda x: relax.op.add(x, relax.const(1.0))),
        lambda x: max(x.mean(), 0) + 1,
    ),
    (chain(lambda x: relax.op.add(relax.op.mean(x), relax.op.max(x))), lambda x: x.mean() + x.max()),
    (chain(relax.op.std), np.std),
    (chain(relax.op.max), np.max),
    (chain(lambda x: relax.op.min(x, keepdims=True)), lambda x: x.min(keepdims=True)),
    (chain(lambda x: relax.op.argmax(relax.op.reshape(x, (-1,)))), np.argmax),
)
CASES = [
    (NORMED, normed, 3 * normal(0, 2, 3, 130), SHARED),
    (*SPREAD, 1 + normal(0, 3000, 11), SHARED),
    (*MEANS[2, 3], normal(0, 2, 40, 7, 7), SHARED),
    (SILU, gated, (1 + np.abs(normal(0, 5, 37))).astype("bfloat16"), ONE),
    (chain(lambda x: relax.op.sort(x, axis=-1)), np.sort, normal(0, 3, 37), None),
    (*pooled("max", 3, 2, 1), normal(0, 3, 17, 13, 13), {"pooling"}),
    (*turned([0, 3, 1, 2]), normal(0, 2, 5, 7, 24), ONE),
    (SCALED, scaled, normal(0, 3, 500, 700), ONE),
]
SLOW_CASES = [
    *((*scalar, 1 + normal(0, *shape), SHARED) for scalar in SCALARS for shape in ((3, 11), (3000, 11))),
    (*SPREAD, 1 + normal(0, 3, 11), SHARED),
    *((*MEANS[axes], normal(0, 2, 40, 7, 7), SHARED) for axes in ((1,), (0, 1, 2, 3))),
    *(
        (chain(relax.op.max), np.max, (100 * normal(0, 170, 113)).astype(dtype), SHARED)
        for dtype in ("float16", "int32")
    ),
    (SILU, gated, (1 + np.abs(normal(0, 5, 37))).astype("float16"), ONE),
    *(
        (chain(lambda x: relax.op.astype(x, "float32"), relax.op.exp, relax.op.negative), lambda x: -np.exp(x),
         np.asarray(3, dtype), ONE)
        for dtype in ("float32", "int32")
    ),
    *((*pooled(*window), normal(0, 3, *shape), {"pooling", "elementwise"}) for window, shape in (
        (("avg", 2, 1, 0), (130, 7, 7)), (("avg", 3, 2, 1), (3, 28, 28)), (("max", 3, 1, 0), (17, 13, 13)),
    )),
    *((*turned(axes), normal(0, 2, 5, 7, 24), ONE) for axes in ([0, 2, 1, 3], [3, 2, 1, 0])),
    (SCALED, scaled, normal(0, 700), ONE),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "right", "x", "rules"), [*CASES, *slow(*SLOW_CASES)])
def test_values(graph, right, x, rules):
    actual, chosen = evaluate(graph, [x])
    tolerance = 4 * HALVES[str(x.dtype)] if str(x.dtype) in HALVES and x.size < 1000 else 1e-4
    assert_close(actual.astype("float64"), np.asarray(right(x.astype("float64"))), tolerance)
    assert rules is None or chosen <= rules


@pytest.mark.slow
@settings(max_examples=12, derandomize=True)
@given(
    shape=st.sampled_from([(3, 5, 7, 7), (2, 40, 3, 4), (70, 33), (2, 130)]),
    axes=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    name=st.sampled_from(["max", "min", "prod"]),
    keepdims=st.booleans(),
    dtype=st.sampled_from(["float32", "float16", "int32"]),
    followed=st.booleans(),
)
@example(shape=(2, 64, 7, 7), axes={2, 3}, name="max", keepdims=True, dtype="bfloat16", followed=True)
@example(shape=(2, 64, 7, 7), axes={1}, name="min", keepdims=False, dtype="bfloat16", followed=False)
def test_extremes_and_products_are_shared_as_sums_are(shape, axes, name, keepdims, dtype, followed):
    axes = sorted(axis for axis in axes if axis < len(shape)) or [0]
    x = 8 * normal(0, *shape)
    if name == "prod":  # of ones and a few others, so that no order of multiplying matters
        x = np.where(np.arange(x.size).reshape(shape) % 37 == 5, -2, 1)
    x = x.astype(dtype)
    operators = [lambda x: getattr(relax.op, name)(x, axes, keepdims=keepdims), *([relax.op.negative] * followed)]
    actual, chosen = evaluate(chain(*operators), [x])
    result = getattr(np, name)(x.astype("float64"), tuple(axes), keepdims=keepdims)
    with np.errstate(over="ignore"):
        result = np.asarray(-result if followed else result).astype(dtype)
    assert np.array_equal(actual.astype("float64"), result.astype("float64"))
    assert chosen <= SHARED


@pytest.mark.parametrize(
    ("name", "nothing", "shape", "axis", "dtype"),
    [
        ("argmin", np.inf, (40, 70), 1, "float32"),
        *slow(*((name, nothing, (40, 70), axis, "float32")
                for name, nothing in (("argmin", np.inf), ("argmax", -np.inf)) for axis in (0, 1))),
        *slow(*((name, nothing, shape, axis, dtype)
                for name, nothing in (("max", -np.inf), ("min", np.inf)) for dtype in ("float32", "bfloat16")
                for shape, axis in (((40, 70), 1), ((40, 70), 0), ((3, 11), None), ((170, 113), None)))),
    ],
)  # fmt: skip
def test_extremes_of_infinities(name, nothing, shape, axis, dtype):
    x = np.full(shape, nothing, dtype)
    if name.startswith("arg"):
        x[7, 9] = 0
    actual, chosen = evaluate(chain(lambda x: getattr(relax.op, name)(x, axis)), [x])
    assert np.array_equal(actual, getattr(np, name)(x, axis))
    assert chosen <= SHARED


@pytest.mark.parametrize(
    ("dtype", "axis"),
    [("bfloat16", -1), *slow(("bfloat16", None), ("int8", -1), ("int8", None), ("int16", -1), ("uint8", None))],
)
def test_reductions_in_types_that_threads_cannot_hand_on(axis, dtype):
    """Threads of a warp would race in shared memory: the order in which they run changes nothing."""
    x = np.arange(64).reshape(8, 8).astype(dtype)
    actual, _ = evaluate(chain(lambda x: relax.op.max(x, axis)), [x])
    assert np.array_equal(actual.astype("float32"), x.max(axis).astype("float32"))


def check_scan(shape, axis, name, exclusive, dtype):
    x = (1 + normal(0, *shape) / 50).astype("float32") if dtype == "float32" else np.ones(shape, dtype)
    actual, chosen = evaluate(chain(lambda x: getattr(relax.op, name)(x, axis, exclusive=exclusive)), [x])
    result = getattr(np, name)(x.astype("float64"), axis)
    if exclusive:
        along = 0 if axis is None else axis
        first = np.full_like(result.take([0], along), int(name == "cumprod"))
        result = np.concatenate([first, result.take(range(result.shape[along] - 1), along)], along)
    assert actual.dtype == dtype
    assert_close(actual, result)
    assert chosen == {"scan"}


def test_a_scan():
    check_scan(shape=(2, 100), axis=-1, name="cumsum", exclusive=False, dtype="float32")


@pytest.mark.slow
@settings(max_examples=8, derandomize=True)
@given(
    shape=st.sampled_from([(1, 1), (2, 7), (3, 100), (1, 257), (2, 600), (2, 5, 3), (1, 3000)]),
    axis=st.sampled_from([-1, 0, None]),
    name=st.sampled_from(["cumsum", "cumprod"]),
    exclusive=st.booleans(),
    dtype=st.sampled_from(["float32", "int64"]),
)
def test_scans(shape, axis, name, exclusive, dtype):
    check_scan(shape, axis, name, exclusive, dtype)


TABLE, WIDE = normal(0, 40, 12), [np.random.default_rng(seed).integers(-(2**60), 2**60, (3, 50)) for seed in (0, 1)]
PLACES = np.array([[3, 39, 0], [7, 7, 21]])


def written(table, places, rows):
    table = table.copy()
    table[places[:, 0]] = rows
    return table


@pytest.mark.parametrize(
    ("operator", "right", "inputs"),
    [
        (relax.op.scatter_nd, written, [TABLE, np.array([[3], [39]]), normal(1, 2, 12)]),
        *slow(
            (lambda table, rows: relax.op.take(table, rows, axis=0), lambda table, rows: table[rows], [TABLE, PLACES]),
            (relax.op.maximum, np.maximum, WIDE),
        ),
    ],
)
def test_equal_values_of_several_inputs(operator, right, inputs):
    actual, _ = evaluate(chain(operator), inputs)
    assert np.array_equal(actual, right(*inputs))
