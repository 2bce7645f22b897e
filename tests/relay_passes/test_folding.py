"""Affine chains, borders of zeros and operations on constants are folded; the values stay."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.fold_affine import fold_affine
from relay_passes.fold_constants import fold_constants
from relay_passes.fold_padding import fold_padding
from relay_passes.ir import bindings_of, main_function, operator_name
from tests.helpers.placements import run
from tests.helpers.relax_graphs import module_of

GENERATOR = np.random.default_rng(0)


def _constant(*shape: int) -> relax.Expr:
    return relax.const(GENERATOR.uniform(0.5, 1.5, shape).astype("float32"))


def _module(build, *shape: int) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    return module_of([x], lambda builder: build(builder, x))


def _operators(module: tvm.IRModule) -> list[str]:
    names = [operator_name(binding.value) for binding in bindings_of(main_function(module))]
    return [name.removeprefix("relax.") for name in names if name]


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
    after = fold_affine(before)
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
    tvm.ir.assert_structural_equal(fold_affine(before), before)


SPACE = [0, 0, 0, 0, 0, 1, 2, 1]
"""Padding of no row above, one row below, two columns on the left and one on the right."""


def _padded(widths: list[int], layout: str = "NCHW", twice: bool = False, **options: object) -> tvm.IRModule:
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


def test_a_border_of_zeros_becomes_padding() -> None:
    before = _padded(SPACE)
    after = fold_padding(before)
    assert _operators(after) == ["nn.conv2d", "nn.relu"]
    x = np.random.default_rng(1).standard_normal((2, 3, 7, 6)).astype("float32")
    for folded, reference in zip(run(after, x), run(before, x), strict=True):
        np.testing.assert_allclose(folded, reference, rtol=1e-5, atol=1e-5)


def test_a_border_that_others_read_stays_for_them() -> None:
    after = fold_padding(_padded(SPACE, twice=True))
    assert sorted(_operators(after)) == ["nn.conv2d", "nn.pad", "nn.relu"]
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
    before = _padded(widths, **options)
    assert _operators(fold_padding(before)) == _operators(before)


A = np.random.default_rng(0).uniform(0.5, 2.0, (2, 3)).astype("float32")
B = np.random.default_rng(1).uniform(0.5, 2.0, (3,)).astype("float32")


def added(build) -> tvm.IRModule:
    """A function that adds what ``build`` makes of two constants to its input."""
    x = relax.Var("x", relax.TensorType((1,), "float32"))

    def emit(builder: relax.BlockBuilder) -> list[relax.Expr]:
        folded = builder.emit(build(relax.const(A), relax.const(B)))
        return [builder.emit(relax.op.add(x, folded))]

    return module_of([x], emit)


CASES = {
    "add": lambda a, b: relax.op.add(a, b),
    "subtract": lambda a, b: relax.op.subtract(a, b),
    "divide": lambda a, b: relax.op.divide(b, a),
    "multiply": lambda a, b: relax.op.multiply(a, b),
    "sqrt": lambda a, b: relax.op.sqrt(a),
    "rsqrt": lambda a, b: relax.op.rsqrt(a),
    "reshape": lambda a, b: relax.op.reshape(a, (3, 2)),
    "permute": lambda a, b: relax.op.permute_dims(a, [1, 0]),
    "expand": lambda a, b: relax.op.expand_dims(b, [0, 2]),
    "broadcast": lambda a, b: relax.op.broadcast_to(b, (4, 3)),
    "take": lambda a, b: relax.op.take(a, relax.const(np.array([[1, 0, 1]])), 0),
    "take of all": lambda a, b: relax.op.take(relax.op.reshape(a, [6]), relax.const(np.array(5))),
    "cast": lambda a, b: relax.op.astype(relax.op.astype(a, "float16"), "float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_constants_become_what_the_compiler_computes(name: str) -> None:
    before = relax.transform.Normalize()(added(CASES[name]))
    after = fold_constants(before)
    assert after.script().count("R.call") == 0
    operators = [binding.value.op.name for binding in after["main"].body.blocks[0].bindings[:-1]]
    assert operators == ["relax.add"]
    x = np.zeros(1, "float32")
    np.testing.assert_allclose(run(after, x)[0], run(before, x)[0], rtol=1e-6)


def test_a_constant_result_stays_a_variable() -> None:
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    table = relax.op.sqrt(relax.const(B))
    after = fold_constants(module_of([x], lambda builder: [builder.emit(table, "table"), x]))
    assert all(isinstance(field, relax.Var) for field in after["main"].body.blocks[0].bindings[-1].value.fields)
    np.testing.assert_allclose(run(after, np.zeros(3, "float32"))[0], np.sqrt(B), rtol=1e-6)
