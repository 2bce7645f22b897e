"""Windows: which indices a range of the result reads, and the same numbers from parts."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

from relay_passes.sharding.region import ShardAxis
from tests.helpers.relax_graphs import graph, weights
from tests.helpers.sharded_graphs import assert_splits_like_whole, refusal

op = relax.op


@pytest.mark.parametrize(
    ("axis", "shares"), [("rows", (0.3, 0.3, 0.4)), ("columns", (0.7, 0.3)), ("batch", (0.5, 0.5))]
)
def test_convolutions_and_pools_in_parts(axis: ShardAxis, shares: tuple[float, ...]) -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        convolution, transposed = op.nn.conv2d, op.nn.conv2d_transpose
        return [
            emit(convolution(x, weights(2, 2, 3, 4), 1, (1, 2, 2, 0)), "one_sided"),
            emit(convolution(x, weights(2, 2, 4, 3), 3, 1), "strided"),
            emit(convolution(x, weights(2, 2, 3, 3), 1, 2, 2), "dilated"),
            emit(convolution(x, weights(4, 1, 3, 3), 2, 1, groups=2), "depthwise"),
            emit(convolution(x, weights(2, 2, 1, 1), 2), "sampled"),
            emit(transposed(x, weights(2, 2, 3, 3), 2, 1, (1, 1)), "with_output_padding"),
            emit(transposed(x, weights(2, 2, 2, 2), 3, 0, (2, 2)), "with_gaps"),
            emit(transposed(x, weights(2, 2, 3, 3), 1, (0, 1, 2, 1), dilation=2), "dilated_transposed"),
            emit(op.nn.max_pool2d(x, 3, 2, 1, ceil_mode=True), "max_pool"),
            emit(op.nn.max_pool2d(x, 2, 1, dilation=3), "dilated_pool"),
            emit(op.nn.avg_pool2d(x, 3, 2, 1), "avg_pool"),
            emit(op.nn.avg_pool2d(x, 2, 2, (0, 0, 1, 1), ceil_mode=True, count_include_pad=True), "counting_padding"),
            emit(op.nn.pad(x, [0, 0, 0, 0, 2, 1, 1, 3], pad_value=1.5), "padded"),
        ]

    module = graph({"x": (2, 2, 13, 12)}, write)
    assert_splits_like_whole(module, axis, shares, ["fused"])


def test_a_pool_over_all_rows_is_a_sum_in_parts() -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        return [
            emit(op.nn.avg_pool2d(x, (7, 5)), "exact"),
            emit(op.nn.avg_pool2d(x, (8, 4), padding=(0, 0, 1, 1)), "padded"),
            emit(op.nn.avg_pool2d(x, (9, 3), padding=(1, 1, 1, 0), ceil_mode=True, count_include_pad=True), "counted"),
        ]

    module = graph({"x": (1, 2, 7, 5)}, write)
    assert_splits_like_whole(module, "rows", (0.5, 0.3, 0.2), ["fused"])


def test_what_windows_cannot_do_is_refused() -> None:
    message = refusal(lambda x: op.nn.conv2d(x, weights(2, 2, 1, 1), padding=(9, 0, 0, 0)))
    assert (
        "'layer' (relax.nn.conv2d) cannot be split along rows: a part of its result would be made of padding" in message
    )
    assert "in the mode 'reflect'" in refusal(lambda x: op.nn.pad(x, [0, 0, 0, 0, 1, 1, 0, 0], "reflect"))
    message = refusal(lambda x: op.nn.conv2d(x, weights(2, 8, 1, 1), data_layout="NHWC"), "columns")
    assert "'C' of its layout NHWC is no axis of its windows" in message
