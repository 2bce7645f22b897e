"""Slices of inputs become inputs; what is no such slice is refused."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I, relax as R

from relay_passes.input_cuts import InputRange, cut_inputs, range_of
from relay_passes.ir import ContractError, operations_of


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((1, 2, 8), "float32"), y: R.Tensor((1, 2, 8), "float32")):
        with R.dataflow():
            upper = R.strided_slice(x, axes=[2], begin=[0], end=[5])
            lower = R.strided_slice(x, axes=[-1], begin=[3], end=[8])
            left = R.strided_slice(y, axes=[1], begin=[0], end=[1])
            first = R.nn.relu(upper)
            second = R.tanh(lower)
            third = R.add(left, y)
            outputs = (first, second, third)
            R.output(outputs)
        return outputs


def test_slices_become_parameters_and_what_nobody_uses_goes() -> None:
    @I.ir_module
    class Expected:
        @R.function
        def main(
            y: R.Tensor((1, 2, 8), "float32"),
            upper: R.Tensor((1, 2, 5), "float32"),
            lower: R.Tensor((1, 2, 5), "float32"),
            left: R.Tensor((1, 1, 8), "float32"),
        ):
            with R.dataflow():
                first = R.nn.relu(upper)
                second = R.tanh(lower)
                third = R.add(left, y)
                outputs = (first, second, third)
                R.output(outputs)
            return outputs

    after, cuts = cut_inputs(Before, {"upper", "lower", "left"})
    tvm.ir.assert_structural_equal(after, Expected)
    assert [range_of(each) for each in cuts] == [
        InputRange("x", 2, 0, 5),
        InputRange("x", 2, 3, 8),
        InputRange("y", 1, 0, 1),
    ]


def test_an_input_of_which_not_all_slices_are_named_stays() -> None:
    after, _ = cut_inputs(Before, {"upper"})
    assert [each.name for each in after["main"].params] == ["x", "y", "upper"]
    tvm.ir.assert_structural_equal(cut_inputs(Before, set())[0], Before)


@I.ir_module
class Others:
    @R.function
    def main(x: R.Tensor((4, 8), "float32")):
        with R.dataflow():
            every = R.strided_slice(x, axes=[1], begin=[0], end=[8], strides=[2])
            corner = R.strided_slice(x, axes=[0, 1], begin=[0, 0], end=[2, 2])
            inner = R.nn.relu(x)
            later = R.strided_slice(inner, axes=[1], begin=[0], end=[4])
            given = R.strided_slice(x, axes=[1], begin=[0], end=[4])
            outputs = (every, corner, later, given)
            R.output(outputs)
        return outputs


@pytest.mark.parametrize("name", [each.var.name for each in operations_of(Others["main"])])
def test_anything_else_is_refused_by_name(name: str) -> None:
    with pytest.raises(ContractError, match=f"'{name}' is not a slice of an input that is used inside only"):
        cut_inputs(Others, {name})
