"""Matrix products over odd extents, broadcast batches, transposed operands, constants on the right, against float64."""

from hypothesis import given, settings, strategies as st
from tvm import relax

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


@settings(max_examples=40)
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
    stored = [each.swapaxes(-1, -2).copy() if turn else each for each, turn in zip((left, right), turned, strict=True)]

    def graph(builder, a, other, *b):
        second = relax.const(stored[1]) if constant else b[0]
        a = transposed(builder, a) if turned[0] else a
        second = transposed(builder, second) if turned[1] else second
        return apply_epilogue(builder, builder.emit(relax.op.matmul(a, second)), bias, other, epilogue)

    actual, chosen = evaluate(graph, [stored[0], residual, *([] if constant else [stored[1]])])
    assert_close(actual, expected_epilogue(product, bias, residual, epilogue), TOLERANCE)
    assert not chosen & {"fallback", "none"}
