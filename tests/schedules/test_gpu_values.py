"""All but products for CUDA against numpy in float64: their source, run on a CPU with barriers.

`make test` runs one case per rule; the others are slow, because each compiles C++. The property tests of the CPU's
kernels run on this target as well.
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


def scaled(x):
    y = x.astype("float64") * normal(1, x.shape[-1])
    return y + np.exp(y)


def written(table, places, rows):
    table = table.copy()
    table[places[:, 0]] = rows
    return table


SHARED = {"general_reduction", "reduction", "whole_reduction", "elementwise"}
ONE = {"elementwise"}
NORMED = chain(lambda x: layer_norm(x, 130), lambda x: relax.op.nn.softmax(x, -1))
SCALED = chain(lambda x: relax.op.multiply(x, relax.const(normal(1, 700))), lambda x: relax.op.add(x, relax.op.exp(x)))
SILU = chain(lambda x: relax.op.add(relax.op.nn.silu(x), relax.op.log(relax.op.rsqrt(x))))
MEAN_OF_IMAGES = chain(lambda x: relax.op.mean(x, (2, 3)), relax.op.nn.relu)
MEAN_AND_MORE = chain(relax.op.mean, relax.op.nn.relu, lambda x: relax.op.add(x, relax.const(1.0)))
CASES = {
    "norm and softmax": (NORMED, normed, [3 * normal(0, 2, 3, 130)], SHARED),
    "less its mean": (
        chain(lambda x: relax.op.subtract(x, relax.op.mean(x))), lambda x: x - x.mean(), [1 + normal(0, 3000, 11)],
        SHARED,
    ),
    "images' means": (MEAN_OF_IMAGES, lambda x: np.maximum(x.mean((2, 3)), 0), [normal(0, 2, 40, 7, 7)], SHARED),
    "threads that cannot hand on": (
        chain(lambda x: relax.op.max(x, -1)), lambda x: x.max(-1), [np.arange(64).reshape(8, 8).astype("bfloat16")],
        None,
    ),
    "half precision": (
        SILU, lambda x: x / (1 + np.exp(-x)) - np.log(x) / 2, [(1 + np.abs(normal(0, 5, 37))).astype("bfloat16")], ONE,
    ),
    "sort": (chain(lambda x: relax.op.sort(x, axis=-1)), np.sort, [normal(0, 3, 37)], None),
    "pool": (
        chain(lambda x: relax.op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1))),
        lambda x: functional.max_pool2d(exact(x), 3, 2, 1).numpy(), [normal(0, 3, 17, 13, 13)], {"pooling"},
    ),
    "transpose": (
        chain(lambda x: relax.op.permute_dims(x, [0, 3, 1, 2]), lambda x: relax.op.concat([x, x], axis=1)),
        lambda x: np.concatenate([x.transpose(0, 3, 1, 2)] * 2, axis=1), [normal(0, 2, 5, 7, 24)], ONE,
    ),
    "many elements": (SCALED, scaled, [normal(0, 3, 100, 700)], ONE),
    "scatter": (
        chain(relax.op.scatter_nd), written, [normal(0, 40, 12), np.array([[3], [39]]), normal(1, 2, 12)], None,
    ),
}  # fmt: skip
SLOW_CASES = {
    "one mean and more": (MEAN_AND_MORE, lambda x: max(x.mean(), 0) + 1, [1 + normal(0, 3000, 11)], SHARED),
    "two reductions": (
        chain(lambda x: relax.op.add(relax.op.mean(x), relax.op.max(x))), lambda x: x.mean() + x.max(),
        [1 + normal(0, 3000, 11)], SHARED,
    ),
    "the place of one": (
        chain(lambda x: relax.op.argmax(relax.op.reshape(x, (-1,)))), np.argmax, [normal(0, 3000, 11)], SHARED,
    ),
    "the largest of many": (chain(relax.op.max), np.max, [(100 * normal(0, 170, 113)).astype("int32")], SHARED),
    "a residual larger than the product": (
        chain(lambda left, right, more: relax.op.add(relax.op.matmul(left, right), more)),
        lambda left, right, more: left @ right + more,
        [normal(0, 1, 12, 20), normal(1, 20, 36), normal(2, 5, 12, 36)], {"matmul", "elementwise"},
    ),
    "no axis": (
        chain(lambda x: relax.op.astype(x, "float32"), relax.op.exp), np.exp, [np.asarray(3, "int32")], ONE,
    ),
    "one axis": (SCALED, scaled, [normal(0, 700)], ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *slow(*SLOW_CASES)])
def test_values(name):
    graph, right, inputs, rules = (CASES | SLOW_CASES)[name]
    actual, chosen = evaluate(graph, inputs)
    tolerance = 4 * HALVES.get(str(inputs[0].dtype), 2.5e-5)
    exact_inputs = [array if array.dtype == "int64" else array.astype("float64") for array in inputs]
    assert_close(actual.astype("float64"), np.asarray(right(*exact_inputs)), tolerance)
    assert rules is None or chosen <= rules


@pytest.mark.slow
@settings(max_examples=16)
@given(
    shape=st.sampled_from([(3, 5, 7, 7), (2, 40, 3, 4), (70, 33), (2, 130)]),
    axes=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    name=st.sampled_from(["max", "min", "prod"]),
    keepdims=st.booleans(),
    dtype=st.sampled_from(["float32", "float16", "int32", "int8"]),
    followed=st.booleans(),
)
@example(shape=(2, 64, 7, 7), axes={2, 3}, name="max", keepdims=True, dtype="bfloat16", followed=True)
@example(shape=(2, 64, 7, 7), axes={1}, name="min", keepdims=False, dtype="bfloat16", followed=False)
def test_extremes_and_products(shape, axes, name, keepdims, dtype, followed):
    axes = sorted(axis for axis in axes if axis < len(shape)) or [0]
    x = 8 * normal(0, *shape)
    if name == "prod":  # of ones and a few others, so that no order of multiplying matters
        x, dtype = np.where(np.arange(x.size).reshape(shape) % 37 == 5, -2, 1), dtype.replace("int8", "int32")
    x = x.astype(dtype)
    operators = [lambda x: getattr(relax.op, name)(x, axes, keepdims=keepdims), *([relax.op.negative] * followed)]
    actual, chosen = evaluate(chain(*operators), [x])
    result = getattr(np, name)(x.astype("float64"), tuple(axes), keepdims=keepdims)
    with np.errstate(over="ignore"):
        result = np.asarray(-result if followed else result).astype(dtype)
    assert np.array_equal(actual.astype("float64"), result.astype("float64"))
    assert dtype == "int8" or chosen <= SHARED


@pytest.mark.parametrize(
    ("name", "nothing", "axis"),
    [
        ("argmin", np.inf, 1),
        *slow(("argmin", np.inf, 0), ("argmax", -np.inf, 0), ("argmax", -np.inf, 1)),
        *slow(*((name, nothing, axis) for name, nothing in (("max", -np.inf), ("min", np.inf)) for axis in (0, None))),
    ],
)
def test_extremes_of_infinities(name, nothing, axis):
    x = np.full((40, 70), nothing, "float32")
    if name.startswith("arg"):
        x[7, 9] = 0
    actual, chosen = evaluate(chain(lambda x: getattr(relax.op, name)(x, axis)), [x])
    assert np.array_equal(actual, getattr(np, name)(x, axis))
    assert chosen <= SHARED


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
@settings(max_examples=8)
@given(
    shape=st.sampled_from([(1, 1), (2, 7), (3, 100), (1, 257), (2, 600), (2, 5, 3), (1, 3000)]),
    axis=st.sampled_from([-1, 0, None]),
    name=st.sampled_from(["cumsum", "cumprod"]),
    exclusive=st.booleans(),
    dtype=st.sampled_from(["float32", "int64"]),
)
def test_scans(shape, axis, name, exclusive, dtype):
    check_scan(shape, axis, name, exclusive, dtype)
