"""Tables of indices and weights along the split axis: the coordinates of the whole, in each part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from relay_passes.ir import constant
from relay_passes.sharding.region import ShardAxis
from tests.helpers.relax_graphs import graph
from tests.helpers.sharded_graphs import assert_splits_like_whole, refusal

op = relax.op
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
