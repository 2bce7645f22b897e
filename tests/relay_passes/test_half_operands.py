"""Operators that multiply take half-precision operands and add in float32; other operators stay unchanged."""

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relay_passes.half_operands import HalfOperands
from relay_passes.ir import bindings_of, main_function, operator_name
from tests.helpers.relax_graphs import graph, module_of, random_inputs, run_together, weights

HALVES = ("float16", "bfloat16")


def network() -> tvm.IRModule:
    def write(emit, x):
        shared = emit(op.nn.relu(x), "shared")
        strided = emit(op.nn.conv2d(shared, weights(8, 2, 3, 3), 2, 1, groups=2), "strided")
        beside = emit(op.nn.conv2d(shared, weights(8, 4, 1, 1, seed=1), 2), "beside")
        flat = emit(op.reshape(emit(op.add(strided, beside), "sum"), (2, 8, 16)), "flat")
        rows = emit(op.nn.conv1d(flat, weights(4, 8, 3, seed=2), padding=1), "rows")
        return [emit(op.matmul(rows, weights(16, 5, seed=3)), "scores")]

    return graph({"x": (2, 4, 8, 8)}, write)


@pytest.mark.parametrize("dtype", HALVES)
def test_operands_are_rounded_and_results_are_float32(dtype: str) -> None:
    module = network()
    after = HalfOperands(dtype)(module)
    before_names = [binding.var.name for binding in bindings_of(main_function(module))]
    bound = {binding.var.name: binding for binding in bindings_of(main_function(after))}
    assert [name for name in bound if name in before_names] == before_names
    for name in ("strided", "beside", "rows", "scores"):
        call = bound[name].value
        assert {str(operand.ty.dtype) for operand in call.args} == {dtype}
        assert str(call.ty.dtype) == "float32"
    rounded = [name for name in bound if name not in before_names]
    assert len(rounded) == 7, "what two of them take is rounded once"
    assert all(operator_name(bound[name].value) == "relax.astype" for name in rounded)
    for name in ("shared", "sum", "flat"):
        assert str(bound[name].value.ty.dtype) == "float32"


def test_a_layer_that_is_called_like_a_rounding_keeps_its_name() -> None:
    def write(emit, x):
        wide = emit(op.matmul(x, weights(4, 4)), "wide")
        return [emit(op.add(wide, wide), "x_float16")]

    module = graph({"x": (2, 4)}, write)
    rounding = HalfOperands("float16")
    after = rounding(module)
    names = [binding.var.name for binding in bindings_of(main_function(after))]
    assert {"wide", "x_float16"} <= set(names)
    assert "x_float16" not in rounding.rounded
    assert set(rounding.rounded) <= set(names)


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_values_differ_by_the_rounding_and_no_more(dtype: str, bits: int) -> None:
    """Products of halves are exact in float32: the difference is that of the operands, of which each has ``bits``."""
    module = network()
    (x,) = random_inputs(module)
    results = run_together({"exact": module, "half": HalfOperands(dtype)(module)}, x)
    (exact,), (half,) = results["exact"], results["half"]
    difference = np.abs(half - exact).max() / np.abs(exact).max()
    assert 2.0 ** (-bits - 6) < difference < 2.0 ** (-bits + 3)


CONVOLUTIONS = {
    "conv3d": ((2, 4, 5, 6, 7), lambda x: op.nn.conv3d(x, weights(6, 2, 3, 2, 1), (1, 2, 1), 1, groups=2)),
    "conv1d_transpose": (
        (2, 4, 9), lambda x: op.nn.conv1d_transpose(x, weights(4, 3, 3), 2, 1, output_padding=1, groups=2)
    ),
    "conv2d_transpose": (
        (2, 4, 5, 6), lambda x: op.nn.conv2d_transpose(x, weights(4, 5, 3, 2), (2, 1), 1, dilation=(1, 2))
    ),
    "conv3d_transpose": (
        (1, 3, 4, 5, 4),
        lambda x: op.nn.conv3d_transpose(x, weights(3, 2, 2, 3, 2), (2, 1, 3), 0, output_padding=(1, 0, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_all_kinds_keep_their_attributes(name: str, dtype: str) -> None:
    shape, convolve = CONVOLUTIONS[name]
    module = graph({"x": shape}, lambda emit, x: [emit(convolve(x), "result")])
    after = HalfOperands(dtype)(module)
    before, call = (
        next(binding.value for binding in bindings_of(main_function(variant)) if binding.var.name == "result")
        for variant in (module, after)
    )
    assert {str(operand.ty.dtype) for operand in call.args} == {dtype}
    tvm.ir.assert_structural_equal(call.ty, before.ty)
    differing = {
        field for field in ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout")
        if str(getattr(call.attrs, field)) != str(getattr(before.attrs, field))
    }  # fmt: skip
    assert not differing
    (x,) = random_inputs(module)
    results = run_together({"exact": module, "half": after}, x)
    (exact,), (half,) = results["exact"], results["half"]
    bits = {"float16": 11, "bfloat16": 8}[dtype]
    assert 0 < np.abs(half - exact).max() < 2.0 ** (-bits + 3) * np.abs(exact).max()


def test_what_adds_in_the_type_of_its_operands_stays() -> None:
    module = graph({"x": (2, 4)}, lambda emit, x: [emit(op.einsum((x, weights(4, 3)), "ij,jk->ik"), "sums")])
    tvm.ir.assert_structural_equal(HalfOperands("float16")(module), module)


def test_a_second_time_changes_nothing() -> None:
    after = HalfOperands("float16")(network())
    tvm.ir.assert_structural_equal(HalfOperands("float16")(after), after)


def test_integers_and_other_precisions_stay() -> None:
    x = relax.Var("x", relax.TensorType((2, 2), "float64"))
    module = module_of([x], lambda builder: [builder.emit(op.matmul(x, x), "product")])
    tvm.ir.assert_structural_equal(HalfOperands("float16")(module), module)
