"""Matrix products of odd extents, broadcast batches and transposed operands against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional
from tvm import relax

from tests.helpers.schedules.emulated_gpu import on_cpu_and_gpu
from tests.helpers.schedules.properties import (
    TOLERANCE,
    apply_epilogue,
    cheap_activations,
    epilogues,
    exact,
    expected_epilogue,
)
from tests.helpers.schedules.schedule_harness import assert_close, evaluate, normal

extents = st.sampled_from([1, 3, 7, 17, 130])
batches = st.sampled_from(
    [((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 1), (3,)), ((1,), (3,)), ((), (3,)), ((3,), ())]
)


def transposed(builder, x):
    axes = list(range(len(x.ty.shape.values)))
    return builder.emit(relax.op.permute_dims(x, [*axes[:-2], axes[-1], axes[-2]]))


@settings(max_examples=24)
@given(
    batch=batches,
    rows=extents,
    depth=extents,
    columns=extents,
    turned=st.tuples(st.booleans(), st.booleans()),
    constant=st.booleans(),
    epilogue=epilogues(cheap_activations),
)
def test_products(batch, rows, depth, columns, turned, constant, epilogue):
    left = normal(0, *batch[0], rows, depth) / depth**0.5
    right, bias = normal(1, *batch[1], depth, columns), normal(2, columns)
    left = left.astype("float32")
    product = exact(left) @ exact(right)
    residual = normal(3, *product.shape)
    stored = [
        operand.swapaxes(-1, -2).copy() if turn else operand
        for operand, turn in zip((left, right), turned, strict=True)
    ]

    def graph(builder, a, residual_input, *b):
        second = relax.const(stored[1]) if constant else b[0]
        a = transposed(builder, a) if turned[0] else a
        second = transposed(builder, second) if turned[1] else second
        return apply_epilogue(builder, builder.emit(relax.op.matmul(a, second)), bias, residual_input, epilogue)

    actual, chosen = evaluate(graph, [stored[0], residual, *([] if constant else [stored[1]])])
    assert_close(actual, expected_epilogue(product, bias, residual, epilogue), TOLERANCE)
    assert not chosen & {"fallback", "none"}


def test_long_sums_come_in_chunks():
    x, weight = normal(0, 64, 1024), normal(1, 1024, 48)
    actual, chosen = evaluate(lambda builder, left: builder.emit(relax.op.matmul(left, relax.const(weight))), [x])
    assert chosen == {"matmul"}
    assert_close(actual, x.astype("float64") @ weight.astype("float64"))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [(0, 1), (0, 100), (129, 130)])
def test_products_of_which_only_a_part_is_read(rows, columns):
    """A slice that begins at 0 fuses like an elementwise operator, and has no whole tiles."""
    x, weight, bias = normal(0, rows, 64), normal(1, 64, 130), normal(2, 130)

    def graph(builder, left):
        y = builder.emit(relax.op.add(builder.emit(relax.op.matmul(left, relax.const(weight))), relax.const(bias)))
        part = builder.emit(relax.op.strided_slice(y, [1], [columns[0]], [columns[1]]))
        return builder.emit(relax.op.add(part, relax.const(1.0)))

    actual, chosen = evaluate(graph, [x])
    assert_close(actual, (exact(x) @ exact(weight) + exact(bias) + 1)[:, slice(*columns)].numpy())
    assert "matmul" in chosen


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


@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", ["float16", "int32", "float64"])
def test_dtypes(evaluate, dtype):
    left, right = (4 * normal(0, 9, 33)).astype(dtype), (4 * normal(1, 33, 20)).astype(dtype)
    actual, _ = evaluate(lambda builder, a: builder.emit(relax.op.matmul(a, relax.const(right, dtype))), [left])
    assert actual.dtype == np.dtype(dtype)
    assert_close(
        actual, left.astype("float64") @ right.astype("float64"), tolerance=2e-3 if dtype == "float16" else 1e-6
    )


def gelu(x):
    return functional.gelu(torch.tensor(x)).numpy()


BESIDE = {
    "compared": (
        lambda builder, x: relax.op.astype(builder.emit(relax.op.greater(x, ZERO)), "float32"),
        lambda x: x > 0,
    ),
    "cast": (lambda builder, x: relax.op.astype(builder.emit(relax.op.astype(x, "int32")), "float32"), np.trunc),
    "chosen": (
        lambda builder, x: relax.op.where(builder.emit(relax.op.greater(x, ZERO)), x, ZERO),
        lambda x: np.maximum(x, 0),
    ),
    "large": (  # each reads its operand some sixty times, so it is not inlined
        lambda builder, x: relax.op.nn.gelu(builder.emit(relax.op.nn.gelu(builder.emit(relax.op.nn.gelu(x))))),
        lambda x: gelu(gelu(gelu(x))),
    ),
}
EPILOGUES = {
    "sum": (relax.op.add, np.add),
    "bool": (relax.op.greater, np.greater),
    "int": (lambda y, z: relax.op.astype(relax.op.multiply(y, z), "int32"), lambda y, z: np.trunc(y * z)),
    "where": (lambda y, z: relax.op.where(relax.op.greater(z, ZERO), y, z), lambda y, z: np.where(z > 0, y, z)),
}
ZERO = relax.const(np.float32(0))


@pytest.mark.parametrize(
    ("beside", "epilogue"), [("compared", "sum"), ("cast", "bool"), ("chosen", "int"), ("large", "where")]
)
def test_operands_of_an_epilogue_that_are_computed_before_the_product(beside, epilogue):
    """They are in the product's kernel, and neither feed it nor depend on it: an LSTM's gates have such operands."""
    left, right, x = normal(0, 5, 32), normal(1, 32, 40), 4 * normal(2, 5, 40)
    (operand, exact_operand), (operator, exact_operator) = BESIDE[beside], EPILOGUES[epilogue]

    def graph(builder, a, b):
        other = builder.emit(operand(builder, b))
        product = builder.emit(relax.op.matmul(a, relax.const(right)))
        return builder.emit(builder.normalize(operator(product, other)))

    actual, chosen = evaluate(graph, [left, x])
    reference = exact_operator(left.astype("float64") @ right, exact_operand(x.astype("float64")))
    assert chosen == {"matmul"}
    assert_close(actual, np.asarray(reference, "float64"), 2e-2 if epilogue == "int" else 1e-4)
