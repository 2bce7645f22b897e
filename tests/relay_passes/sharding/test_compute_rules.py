"""Elementwise operators with all ways to broadcast, norms over other axes, and what is reduced over the split one."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

from relay_passes.sharding.region import INDICES, ShardAxis
from tests.helpers.relax_graphs import graph, weights
from tests.helpers.sharded_graphs import assert_splits_like_whole, refusal

op = relax.op


@pytest.mark.parametrize("axis", INDICES)
def test_elementwise_in_parts(axis: ShardAxis) -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        table = emit(op.abs(weights(1, 1, 7, 6)), "table")
        large = emit(op.greater(x, weights(7, 1)), "large")
        statistics = emit(op.nn.batch_norm(x, *[weights(2)] * 3, weights(2, seed=4), 1, training=False), "norm")
        single = emit(op.strided_slice(x, [INDICES[axis]], [1], [2]), "single")
        return [
            emit(op.where(large, x, table), "chosen"),
            emit(op.clip(emit(op.subtract(weights(2, 7, 6), x), "difference"), 0, 1), "clipped"),
            emit(op.nn.softmax(emit(relax.TupleGetItem(statistics, 0), "norm_0"), 1), "softmax"),
            emit(op.nn.layer_norm(x, weights(2), weights(2), 1), "layer_norm"),
            emit(op.multiply(x, single), "by_one_index"),
            emit(op.sum(x, 1), "sum_of_channels"),
            emit(op.argmax(x, 1, keepdims=True), "channel"),
            emit(op.cumsum(x, 1), "cumulated"),
        ]

    assert_splits_like_whole(graph({"x": (4, 2, 7, 6)}, write), axis, (0.5, 0.5), ["fused"])


@pytest.mark.parametrize("keeps", [True, False])
def test_reductions_are_made_of_parts(keeps: bool) -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        reductions = {"mean": op.mean, "sum": op.sum, "max": op.max, "min": op.min}
        reduced = {name: emit(kind(x, [2, 3], keeps), name) for name, kind in reductions.items()}
        gate = reduced["max"] if keeps else emit(op.expand_dims(reduced["max"], [2, 3]), "gate")
        averaged = emit(op.nn.adaptive_avg_pool2d(x, 1), "averaged")
        flat = emit(op.reshape(averaged, (2, 3)), "flat")
        return [*reduced.values(), emit(op.subtract(x, gate), "gated"), emit(op.matmul(flat, weights(3, 4)), "classes")]

    assert_splits_like_whole(graph({"x": (2, 3, 9, 4)}, write), "rows", (0.5, 0.3, 0.2))


def test_a_total_that_has_the_length_of_the_axis_in_its_place() -> None:
    """Its parts are partial sums, not ranges of it."""

    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        return [emit(op.add(x, emit(op.sum(x, [2]), "total")), "added")]

    assert_splits_like_whole(graph({"x": (4, 4, 4, 3)}, write), "rows", (0.5, 0.5))


def test_what_computes_over_the_axis_is_refused() -> None:
    assert "'layer' (relax.nn.softmax) cannot be split along rows" in refusal(lambda x: op.nn.softmax(x, 2))
    assert "computes over that axis" in refusal(lambda x: op.nn.group_norm(x, weights(2), weights(2), 2, 1, [2, 3]))
    assert "computes over that axis" in refusal(lambda x: op.variance(x, [2]))
    assert "only a mean of all pixels" in refusal(lambda x: op.nn.adaptive_avg_pool2d(x, 3))
    message = refusal(lambda x: op.nn.batch_norm(x, *[weights(2)] * 4, 1, training=True), "batch")
    assert "statistics of the batch" in message
    assert "no rule is known for this operator; end the shard before it" in refusal(lambda x: op.sort(x, 1))
