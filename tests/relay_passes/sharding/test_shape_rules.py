"""The split axis through reshapes, permutations, concatenations, slices and products."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

from relay_passes.sharding.region import INDICES, ShardAxis
from tests.helpers.relax_graphs import graph, weights
from tests.helpers.sharded_graphs import assert_splits_like_whole, refusal

op = relax.op


@pytest.mark.parametrize("axis", INDICES)
def test_shapes_in_parts(axis: ShardAxis) -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        halves = emit(op.split(x, 2, 1), "halves")
        first_half, second_half = (emit(relax.TupleGetItem(halves, index), f"half_{index}") for index in range(2))
        return [
            emit(
                op.concat([emit(op.expand_dims(first_half, 1), "a"), emit(op.expand_dims(second_half, 1), "b")], 1),
                "both",
            ),
            emit(op.permute_dims(x, [2, 0, 3, 1]), "permuted"),
            emit(op.reshape(x, (6, 2, 2, 8, 9)), "channels_apart"),
            emit(op.stack([first_half, second_half], 2), "stacked"),
            emit(op.strided_slice(x, [1, 3], [1, 2], [3, 100], [1, 1]), "cut"),
            emit(op.strided_slice(x, [2, 0], [-7, 1], [8, 6], [2, 1]), "sampled"),
            emit(op.concat([first_half, weights(6, 2, 8, 9), second_half], 1), "with_constant"),
            emit(op.broadcast_to(emit(op.expand_dims(first_half, 0), "first"), (3, 6, 2, 8, 9)), "repeated"),
        ]

    assert_splits_like_whole(graph({"x": (6, 4, 8, 9)}, write), axis, (0.4, 0.6), ["fused"])


def test_rows_are_joined_and_taken_apart_in_reshapes() -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        lines = emit(op.reshape(x, (2, 3, 5, 2, 4)), "lines_apart")
        middle = emit(op.reshape(emit(op.permute_dims(lines, [0, 1, 2, 4, 3]), "turned"), (2, 3, 40)), "joined")
        return [emit(op.negative(middle), "negated"), emit(op.concat([lines, lines], 2), "twice")]

    module = graph({"x": (2, 3, 10, 4)}, write)
    assert_splits_like_whole(module, "rows", (0.37, 0.33, 0.3))


def test_products_of_a_batch_and_of_rows() -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        turned = emit(op.permute_dims(x, [0, 1, 3, 2]), "turned")
        scores = emit(op.nn.softmax(emit(op.matmul(x, turned), "scores"), -1), "probabilities")
        return [emit(op.matmul(scores, x), "attended"), emit(op.matmul(x, weights(5, 3)), "projected")]

    module = graph({"x": (4, 2, 6, 5)}, write)
    assert_splits_like_whole(module, "batch", (0.5, 0.25, 0.25), ["fused"])
    rows = graph({"x": (4, 2, 6, 5)}, lambda emit, x: [emit(op.matmul(x, weights(5, 3)), "projected")])
    assert_splits_like_whole(rows, "rows", (0.5, 0.5), ["fused"])


def test_shapes_without_the_axis_are_refused() -> None:
    assert "(2, 2, 8, 8) becomes (2, 128), which has no such axis" in refusal(lambda x: op.reshape(x, (2, 128)))
    assert "it takes that axis apart" in refusal(lambda x: op.split(x, 2, 2))
    assert "a stride below 1" in refusal(lambda x: op.strided_slice(x, [2], [7], [0], [-1]))
