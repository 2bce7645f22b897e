from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.fold_padding import FoldPadding
from relay_passes.ir import operator_name
from tests.helpers.placements import run
from tests.helpers.relax_graphs import module_of

SPACE = [0, 0, 0, 0, 0, 1, 2, 1]
"""Padding of no row above, one row below, two columns on the left and one on the right."""


def _module(widths: list[int], layout: str = "NCHW", twice: bool = False, **options: object) -> tvm.IRModule:
    generator = np.random.default_rng(0)
    shape, kernel = ((2, 3, 7, 6), (4, 3, 3, 3)) if layout == "NCHW" else ((2, 7, 6, 3), (3, 3, 3, 4))
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    weight = relax.const(generator.standard_normal(kernel).astype("float32"))
    layouts = {"data_layout": layout, "kernel_layout": "OIHW" if layout == "NCHW" else "HWIO"}

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        padded = builder.emit(relax.op.nn.pad(x, widths, **options))
        result = builder.emit(relax.op.nn.conv2d(padded, weight, strides=2, padding=[1, 0, 0, 1], **layouts))
        return [builder.emit(relax.op.nn.relu(result)), *[padded] * twice]

    return module_of([x], emit)


def _operators(module: tvm.IRModule) -> list[str]:
    return [name for binding in module["main"].body.blocks[0].bindings if (name := operator_name(binding.value))]


def test_a_border_of_zeros_becomes_padding() -> None:
    before = _module(SPACE)
    after = FoldPadding()(before)
    assert _operators(after) == ["relax.nn.conv2d", "relax.nn.relu"]
    x = np.random.default_rng(1).standard_normal((2, 3, 7, 6)).astype("float32")
    for folded, reference in zip(run(after, x), run(before, x), strict=True):
        np.testing.assert_allclose(folded, reference, rtol=1e-5, atol=1e-5)


def test_a_border_that_others_read_stays_for_them() -> None:
    after = FoldPadding()(_module(SPACE, twice=True))
    assert sorted(_operators(after)) == ["relax.nn.conv2d", "relax.nn.pad", "relax.nn.relu"]
    (convolution,) = (
        binding.value
        for binding in after["main"].body.blocks[0].bindings
        if operator_name(binding.value).endswith("conv2d")
    )
    assert convolution.args[0].name == "x"


@pytest.mark.parametrize(
    ("widths", "options"),
    [
        (SPACE, {"pad_value": 1.0}),
        (SPACE, {"pad_mode": "reflect"}),
        ([0, 1, 0, 0, 0, 0, 0, 0], {}),  # the batch
        ([0, 0, 1, 1, 1, 1, 0, 0], {"layout": "NHWC"}),
    ],
)
def test_other_borders_stay(widths: list[int], options: dict[str, object]) -> None:
    before = _module(widths, **options)
    assert _operators(FoldPadding()(before)) == _operators(before)
