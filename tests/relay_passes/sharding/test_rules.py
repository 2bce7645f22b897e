"""The split axis through every kind of operator: parts have the values of the whole; what has no rule is refused."""

from typing import Any

import numpy as np
import pytest
from tvm import relax

from relay_passes.ir import constant
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
    assert "'C' of its layout NHWC is not an axis of its windows" in message


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
    assert "no rule is known for this operator; end the sharded layers before it" in refusal(lambda x: op.sort(x, 1))


COORDINATES = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
ROUNDED = (
    *(
        ("half_pixel", rounding)
        for rounding in ("floor", "ceil", "round", "round_prefer_floor", "round_prefer_ceil", "")
    ),
    *(("align_corners", rounding) for rounding in ("round", "")),
    *(("asymmetric", rounding) for rounding in ("floor", "ceil", "")),
    ("tf_half_pixel_for_nn", "floor"),
)


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("size", [(20, 5), (7, 17)])
def test_images_are_resized_in_parts(size: tuple[int, int], axis: ShardAxis) -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        def resized(method: str, coordinates: str, rounding: str) -> relax.Var:
            named = {"coordinate_transformation_mode": coordinates, "rounding_method": rounding}
            return emit(op.image.resize2d(x, size, method=method, **named), f"{method}_{coordinates}_{rounding}")

        return [
            *(resized(method, coordinates, "") for method in ("linear", "cubic") for coordinates in COORDINATES),
            *(resized("nearest_neighbor", coordinates, rounding) for coordinates, rounding in ROUNDED),
        ]

    assert_splits_like_whole(graph({"x": (1, 2, 10, 7)}, write), axis, (0.6, 0.4), ["fused"])


def test_tables_of_the_frontends_are_taken_in_parts() -> None:
    generator = np.random.default_rng(0)
    interpolation = generator.random((14, 9)) * (generator.random((14, 9)) < 0.3)

    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        reflected = constant(np.array([2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6]))
        mirrored = emit(op.take(x, reflected, axis=2, mode="fast"), "reflected")
        product = emit(op.matmul(constant(interpolation.astype(np.float32)), x), "interpolated")
        channel = emit(op.take(x, constant(np.array(3)), axis=1, mode="fast"), "one_channel")
        return [
            emit(op.add(mirrored, product), "sum"),
            emit(op.take(x, constant(np.arange(2)), axis=3), "columns"),
            channel,
        ]

    assert_splits_like_whole(graph({"x": (2, 4, 9, 5)}, write), "rows", (0.3, 0.7))


def test_embeddings_of_a_batch() -> None:
    table = constant(np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32))
    module = graph(
        {"x": (6, 4)}, lambda emit, x: [emit(op.take(table, emit(op.astype(x, "int64"), "tokens"), 0), "words")]
    )
    assert_splits_like_whole(module, "batch", (0.5, 0.2, 0.3))


def test_what_has_no_table_is_refused() -> None:
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize"}
    assert "'tf_crop_and_resize', of a region" in refusal(lambda x: op.image.resize2d(x, (9, 9), roi=[0.0] * 4, **crop))
    outside = constant(np.array([0, -1]))
    assert "indices outside its 8" in refusal(lambda x: op.take(x, outside, axis=2))
    assert "sums over that axis" in refusal(lambda x: op.matmul(x, x))
