"""All but products for CUDA against float64: their source, run on a CPU with barriers.

`make test` runs one case per rule; the others are slow, because each compiles C++.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from tvm import relax

from schedules.gpu.whole_reduction import LONG
from tests.helpers.schedules.emulated_gpu import evaluate
from tests.helpers.schedules.gpu_kernels import HALVES, needs_headers, slow
from tests.helpers.schedules.schedule_harness import assert_close, normal

pytestmark = needs_headers


@pytest.mark.parametrize("extent", [130, *slow(7)])
def test_sums_that_threads_share(extent):
    x, gamma, beta = 3 * normal(0, 2, 3, extent), normal(1, extent), normal(2, extent)

    def graph(builder, data):
        weights = relax.const(gamma), relax.const(beta)
        normed = builder.emit(relax.op.nn.layer_norm(data, *weights, axes=[-1], epsilon=1e-5))
        return builder.emit(relax.op.nn.softmax(normed, -1))

    actual, chosen = evaluate(graph, [x])
    exact, scale, shift = (torch.tensor(array.astype("float64")) for array in (x, gamma, beta))
    reference = torch.softmax(torch.nn.functional.layer_norm(exact, (extent,), scale, shift, 1e-5), -1)
    assert_close(actual, reference.numpy(), tolerance=1e-3)
    assert chosen <= {"general_reduction", "reduction", "elementwise"}


def of_all(*operators):
    def graph(builder, data):
        result = data
        for operator in operators:
            result = builder.emit(operator(result))
        return result

    return graph


SCALARS = {
    "mean": (of_all(relax.op.mean), np.mean),
    "with what follows": (
        of_all(relax.op.mean, relax.op.nn.relu, lambda x: relax.op.add(x, relax.const(1.0))),
        lambda x: np.maximum(x.mean(), 0) + 1,
    ),
    "with another": (
        lambda builder, x: builder.emit(relax.op.add(builder.emit(relax.op.mean(x)), builder.emit(relax.op.max(x)))),
        lambda x: x.mean() + x.max(),
    ),
    "two in turn": (of_all(relax.op.std), np.std),
    "largest": (of_all(relax.op.max), np.max),
    "with its axes": (of_all(lambda x: relax.op.min(x, keepdims=True)), lambda x: x.min(keepdims=True)),
    "spread again": (of_all(lambda x: relax.op.subtract(x, relax.op.mean(x))), lambda x: x - x.mean()),
    "a place": (of_all(lambda x: relax.op.argmax(relax.op.reshape(x, (-1,)))), np.argmax),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("spread again", (3000, 11)), *slow(*((name, shape) for name in SCALARS for shape in ((3, 11), (3000, 11))))],
)
def test_scalars_of_all_elements(name, shape):
    graph, exact = SCALARS[name]
    x = 1 + normal(0, *shape)
    actual, chosen = evaluate(graph, [x])
    assert_close(actual, np.asarray(exact(x.astype("float64"))))
    assert "fallback" not in chosen
    assert "whole_reduction" in chosen or x.size < LONG


@pytest.mark.slow
@pytest.mark.parametrize("graph", [of_all(relax.op.nn.relu), of_all(relax.op.exp, relax.op.negative)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_one_scalar(graph, dtype):
    x = np.asarray(3, dtype)
    actual, chosen = evaluate(lambda builder, data: graph(builder, builder.emit(relax.op.astype(data, "float32"))), [x])
    assert actual.shape == ()
    assert_close(actual, np.asarray(3.0 if actual > 0 else -np.exp(3.0)))
    assert chosen == {"elementwise"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_the_largest_of_all_elements_in_other_types(dtype):
    x = (100 * normal(0, 170, 113)).astype(dtype)
    actual, chosen = evaluate(of_all(relax.op.max), [x])
    assert actual == x.max()
    assert chosen == {"whole_reduction"}


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

    def graph(builder, data):
        result = builder.emit(getattr(relax.op, name)(data, axes, keepdims=keepdims))
        return builder.emit(relax.op.negative(result)) if followed else result

    actual, chosen = evaluate(graph, [x])
    exact = getattr(np, name)(x.astype("float64"), tuple(axes), keepdims=keepdims)
    with np.errstate(over="ignore"):
        exact = np.asarray(-exact if followed else exact).astype(dtype)
    assert np.array_equal(actual.astype("float64"), exact.astype("float64"))
    assert chosen <= {"reduction", "general_reduction", "whole_reduction", "elementwise"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axes"), [((40, 70), [1]), ((40, 70), [0]), ((3, 11), None), ((170, 113), None)])
@pytest.mark.parametrize(("name", "nothing"), [("max", -np.inf), ("min", np.inf)])
def test_extremes_of_infinities(name, nothing, shape, axes, dtype):
    x = np.full(shape, nothing, dtype)
    actual, chosen = evaluate(lambda builder, data: builder.emit(getattr(relax.op, name)(data, axes)), [x])
    assert np.array_equal(actual, getattr(np, name)(x, axes and tuple(axes)))
    assert chosen <= {"reduction", "whole_reduction"}


@pytest.mark.parametrize(
    ("name", "nothing", "axis"),
    [("argmin", np.inf, 1), *slow(("argmin", np.inf, 0), ("argmax", -np.inf, 0), ("argmax", -np.inf, 1))],
)
def test_places_of_infinities(name, nothing, axis):
    x = np.full((40, 70), nothing, "float32")
    x[7, 9] = 0
    actual, chosen = evaluate(lambda builder, data: builder.emit(getattr(relax.op, name)(data, axis)), [x])
    assert np.array_equal(actual, getattr(np, name)(x, axis))
    assert chosen <= {"general_reduction"}


@pytest.mark.parametrize(
    ("dtype", "axis"),
    [("bfloat16", -1), *slow(("bfloat16", None), ("int8", -1), ("int8", None), ("int16", -1), ("uint8", None))],
)
def test_reductions_in_types_that_threads_cannot_hand_on(axis, dtype):
    """Threads of a warp would race in shared memory: the order in which they run changes nothing."""
    x = np.arange(64).reshape(8, 8).astype(dtype)
    actual, _ = evaluate(lambda builder, data: builder.emit(relax.op.max(data, axis)), [x])
    assert np.array_equal(actual.astype("float32"), x.max(axis).astype("float32"))


def check_scan(shape, axis, name, exclusive, dtype):
    x = (1 + normal(0, *shape) / 50).astype("float32") if dtype == "float32" else np.ones(shape, dtype)
    operator = getattr(relax.op, name)
    actual, chosen = evaluate(lambda builder, data: builder.emit(operator(data, axis, exclusive=exclusive)), [x])
    exact = getattr(np, name)(x.astype("float64"), axis)
    if exclusive:
        along = 0 if axis is None else axis
        first = np.full_like(exact.take([0], along), int(name == "cumprod"))
        exact = np.concatenate([first, exact.take(range(exact.shape[along] - 1), along)], along)
    assert actual.dtype == dtype
    assert_close(actual, exact)
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


@pytest.mark.parametrize("axes", [[2, 3], *slow([1], [0, 1, 2, 3])])
def test_means(axes):
    x = normal(0, 2, 40, 7, 7)

    def graph(builder, data):
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.mean(data, axes))))

    actual, chosen = evaluate(graph, [x])
    assert_close(actual, np.maximum(np.asarray(x.astype("float64").mean(tuple(axes))), 0))
    assert chosen <= {"reduction", "general_reduction", "fallback"}


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16")])
def test_functions_of_halves(dtype):
    x = (1 + np.abs(normal(0, 5, 37))).astype(dtype)

    def graph(builder, data):
        gate = builder.emit(relax.op.nn.silu(data))
        return builder.emit(relax.op.add(gate, builder.emit(relax.op.log(builder.emit(relax.op.rsqrt(data))))))

    actual, chosen = evaluate(graph, [x])
    exact = x.astype("float64")
    assert_close(actual.astype("float64"), exact / (1 + np.exp(-exact)) - np.log(exact) / 2, 4 * HALVES[dtype])
    assert chosen == {"elementwise"}


@pytest.mark.slow
@pytest.mark.parametrize("places", ["int32", "int64"])
def test_rows_of_a_table(places):
    table, rows = normal(0, 40, 12), np.array([[3, 39, 0], [7, 7, 21]], places)
    actual, _ = evaluate(lambda builder, *operands: builder.emit(relax.op.take(*operands, axis=0)), [table, rows])
    assert np.array_equal(actual, table[rows])


def test_rows_that_are_written_into_a_table():
    table, rows, places = normal(0, 40, 12), normal(1, 2, 12), np.array([[3], [39]], "int64")
    written = table.copy()
    written[places[:, 0]] = rows
    actual, _ = evaluate(lambda builder, *operands: builder.emit(relax.op.scatter_nd(*operands)), [table, places, rows])
    assert np.array_equal(actual, written)


@pytest.mark.slow
def test_the_larger_of_two_wide_integers():
    left, right = (np.random.default_rng(seed).integers(-(2**60), 2**60, (3, 50)) for seed in (0, 1))
    actual, _ = evaluate(lambda builder, *operands: builder.emit(relax.op.maximum(*operands)), [left, right])
    assert np.array_equal(actual, np.maximum(left, right))


def test_sorted_rows():
    x = normal(0, 3, 37)
    actual, _ = evaluate(lambda builder, data: builder.emit(relax.op.sort(data, axis=-1)), [x])
    assert np.array_equal(actual, np.sort(x, -1))


@pytest.mark.parametrize(
    ("channels", "size", "window", "stride", "padding", "kind"),
    [
        (17, 13, 3, 2, 1, "max"),
        *slow((130, 7, 2, 1, 0, "avg"), (3, 28, 3, 2, 1, "avg"), (17, 13, 3, 1, 0, "max"), (130, 28, 2, 2, 0, "max")),
    ],
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
    assert chosen <= {"pooling", "elementwise"}


@pytest.mark.parametrize("axes", [[0, 3, 1, 2], *slow([0, 2, 1, 3], [3, 2, 1, 0])])
def test_transposes_and_concatenations(axes):
    x = normal(0, 2, 5, 7, 24)

    def graph(builder, data):
        moved = builder.emit(relax.op.permute_dims(data, axes))
        return builder.emit(relax.op.concat([moved, moved], axis=1))

    actual, chosen = evaluate(graph, [x])
    moved = x.transpose(axes)
    assert np.array_equal(actual, np.concatenate([moved, moved], axis=1))
    assert chosen == {"elementwise"}


@pytest.mark.parametrize("shape", [(3, 500, 700), *slow(((64, 64, 64),), ((7,),))])
def test_elements_are_computed_in_vectors_where_they_lie_side_by_side(shape):
    x, scale = normal(0, *shape), normal(1, *shape[-1:])

    def graph(builder, data, factor):
        product = builder.emit(relax.op.multiply(data, factor))
        return builder.emit(relax.op.add(product, builder.emit(relax.op.exp(product))))

    actual, chosen = evaluate(graph, [x, scale])
    exact = x.astype("float64") * scale
    assert_close(actual, exact + np.exp(exact))
    assert chosen == {"elementwise"}
