"""Matrix products of odd shapes against numpy in float64."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tvm import relax

from tests.helpers.schedules.schedule_harness import assert_close, evaluate, normal

extents = st.sampled_from([1, 3, 7, 13, 16, 17, 130])


@settings(max_examples=12)
@given(batch=st.sampled_from([(), (3,)]), rows=extents, depth=extents, columns=extents)
def test_constant_weights(batch, rows, depth, columns):
    x, weight, bias = normal(0, *batch, rows, depth), normal(1, depth, columns), normal(2, columns)

    def graph(builder, left):
        y = builder.emit(relax.op.matmul(left, relax.const(weight)))
        y = builder.emit(relax.op.add(y, relax.const(bias)))
        return builder.emit(relax.op.nn.gelu(y))

    actual, chosen = evaluate(graph, [x])
    product = np.matmul(x.astype("float64"), weight.astype("float64")) + bias
    error_function = np.vectorize(math.erf)
    assert chosen == {"matmul"}
    assert_close(actual, product * 0.5 * (1 + error_function(product / np.sqrt(2))))


@settings(max_examples=8)
@given(
    batch=st.sampled_from([((2, 3), (2, 3)), ((3,), (1,)), ((1,), (3,)), ((), (3,)), ((2, 1), (3,))]),
    rows=extents,
    depth=extents,
    columns=extents,
)
def test_two_activations(batch, rows, depth, columns):
    left, right = normal(0, *batch[0], rows, depth), normal(1, *batch[1], depth, columns)
    actual, _ = evaluate(lambda builder, a, b: builder.emit(relax.op.matmul(a, b)), [left, right])
    assert_close(actual, np.matmul(left.astype("float64"), right.astype("float64")))


def test_long_sums_come_in_chunks():
    x, weight = normal(0, 64, 1024), normal(1, 1024, 48)
    actual, chosen = evaluate(lambda builder, left: builder.emit(relax.op.matmul(left, relax.const(weight))), [x])
    assert chosen == {"matmul"}
    assert_close(actual, x.astype("float64") @ weight.astype("float64"))


def test_transposed_and_broadcast_weights_are_packed_once():
    x, weight = normal(0, 3, 7, 20), normal(1, 33, 20)

    def graph(builder, left):
        right = builder.emit(relax.op.permute_dims(relax.const(weight), [1, 0]))
        right = builder.emit(relax.op.broadcast_to(right, (3, 20, 33)))
        return builder.emit(relax.op.matmul(left, right))

    actual, chosen = evaluate(graph, [x])
    assert chosen == {"matmul"}
    assert_close(actual, x.astype("float64") @ weight.astype("float64").T)


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 4))])
def test_vectors(shapes):
    left, right = (normal(seed, *shape) for seed, shape in enumerate(shapes))
    actual, _ = evaluate(lambda builder, a, b: builder.emit(relax.op.matmul(a, b)), [left, right])
    assert_close(actual, np.asarray(left.astype("float64") @ right.astype("float64")))


@pytest.mark.parametrize("dtype", ["float16", "int32", "float64"])
def test_dtypes(dtype):
    left, right = (4 * normal(0, 9, 33)).astype(dtype), (4 * normal(1, 33, 20)).astype(dtype)
    actual, _ = evaluate(lambda builder, a: builder.emit(relax.op.matmul(a, relax.const(right, dtype))), [left])
    assert actual.dtype == np.dtype(dtype)
    assert_close(
        actual, left.astype("float64") @ right.astype("float64"), tolerance=2e-3 if dtype == "float16" else 1e-6
    )
