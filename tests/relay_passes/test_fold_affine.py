from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.fold_affine import FoldAffine
from tests.helpers.placements import run
from tests.helpers.relax_graphs import module_of

GENERATOR = np.random.default_rng(0)


def _constant(*shape: int) -> relax.Expr:
    return relax.const(GENERATOR.uniform(0.5, 1.5, shape).astype("float32"))


def _module(build, *shape: int) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    return module_of([x], lambda builder: build(builder, x))


def _operators(module: tvm.IRModule) -> list[str]:
    values = [binding.value for binding in module["main"].body.blocks[0].bindings]
    return [value.op.name.removeprefix("relax.") for value in values if isinstance(value, relax.Call)]


def _conv_then_norm(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Expr]:
    value = builder.emit(relax.op.nn.conv2d(x, _constant(6, 3, 3, 3), padding=1))
    value = builder.emit(relax.op.add(value, _constant(1, 6, 1, 1)))
    value = builder.emit(relax.op.subtract(value, _constant(6, 1, 1)))
    value = builder.emit(relax.op.divide(value, _constant(1, 6, 1, 1)))
    value = builder.emit(relax.op.multiply(_constant(1, 6, 1, 1), value))
    return [builder.emit(relax.op.add(value, _constant(1, 6, 1, 1)))]


def _linear_then_scale(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Expr]:
    value = builder.emit(relax.op.matmul(x, _constant(5, 7)))
    value = builder.emit(relax.op.subtract(_constant(7), value))
    return [builder.emit(relax.op.multiply(value, relax.const(3.0, "float32")))]


@pytest.mark.parametrize(
    ("build", "shape", "expected"),
    [
        (_conv_then_norm, (2, 3, 5, 5), ["nn.conv2d", "add"]),
        (_linear_then_scale, (4, 5), ["matmul", "add"]),
    ],
)
def test_chains_fold_into_weights(build, shape: tuple[int, ...], expected: list[str]) -> None:
    before = _module(build, *shape)
    after = FoldAffine()(before)
    assert _operators(after) == expected
    x = GENERATOR.standard_normal(shape).astype("float32")
    for folded, reference in zip(run(after, x), run(before, x), strict=True):
        np.testing.assert_allclose(folded, reference, rtol=1e-4, atol=1e-4)


def _used_twice(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Expr]:
    value = builder.emit(relax.op.matmul(x, _constant(5, 7)))
    return [builder.emit(relax.op.multiply(value, _constant(7))), value]


def _along_rows(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Expr]:
    value = builder.emit(relax.op.matmul(x, _constant(5, 7)))
    return [builder.emit(relax.op.multiply(value, _constant(7, 1)))]


def _divided_by(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Expr]:
    value = builder.emit(relax.op.matmul(x, _constant(5, 7)))
    return [builder.emit(relax.op.divide(_constant(7), value))]


def _bias_only(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Expr]:
    value = builder.emit(relax.op.matmul(x, _constant(5, 7)))
    return [builder.emit(relax.op.add(value, _constant(7)))]


@pytest.mark.parametrize("build", [_used_twice, _along_rows, _divided_by, _bias_only])
def test_what_cannot_or_need_not_be_folded_stays(build) -> None:
    before = _module(build, 7, 5)
    tvm.ir.assert_structural_equal(FoldAffine()(before), before)
