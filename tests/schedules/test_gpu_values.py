"""Elementwise kernels, tables, pooling and transposes for CUDA against float64: their source, run on a CPU.

`make test` runs one case per rule; the others are slow, because each compiles C++.
"""

import numpy as np
import pytest
import torch
from tvm import relax

from tests.helpers.schedules.emulated_gpu import evaluate
from tests.helpers.schedules.gpu_kernels import HALVES, needs_headers, slow
from tests.helpers.schedules.schedule_harness import assert_close, normal

pytestmark = needs_headers


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
    actual, _ = evaluate(lambda builder, *given: builder.emit(relax.op.take(*given, axis=0)), [table, rows])
    assert np.array_equal(actual, table[rows])


def test_rows_that_are_written_into_a_table():
    table, rows, places = normal(0, 40, 12), normal(1, 2, 12), np.array([[3], [39]], "int64")
    written = table.copy()
    written[places[:, 0]] = rows
    actual, _ = evaluate(lambda builder, *given: builder.emit(relax.op.scatter_nd(*given)), [table, places, rows])
    assert np.array_equal(actual, written)


@pytest.mark.slow
def test_the_larger_of_two_wide_integers():
    left, right = (np.random.default_rng(seed).integers(-(2**60), 2**60, (3, 50)) for seed in (0, 1))
    actual, _ = evaluate(lambda builder, *given: builder.emit(relax.op.maximum(*given)), [left, right])
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
