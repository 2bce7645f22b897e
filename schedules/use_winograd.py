"""Convolutions over blocked channels that Winograd's method makes faster, with their weights transformed.

The transformed weights are 4 times (tiles of 4 x 4) or 1.78 times (2 x 2) as large as the kernel: in memory and in the
bundle.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import mutator

from tvm_split.schedules.constants import array_of
from tvm_split.schedules.cpu.winograd_choice import Winograd, Workload, choose_winograd
from tvm_split.schedules.legalize.common import OUT_ELEMENTWISE_FUSABLE
from tvm_split.schedules.legalize.winograd import winograd_conv2d
from tvm_split.schedules.module_mutator import CONV2D, ModuleMutator, operator_of
from tvm_split.schedules.shapes import static_shape
from tvm_split.schedules.traits import Traits
from tvm_split.schedules.winograd_transform import TAPS, transformed_kernel


def use_winograd(module: tvm.IRModule, traits: Traits, threads: int) -> tvm.IRModule:
    """Requires blocked layouts; convolutions that are not chosen stay operators, for the legalization."""
    return _UseWinograd(module, traits, threads).transform()


@mutator
class _UseWinograd(ModuleMutator):
    def __init__(self, module: tvm.IRModule, traits: Traits, threads: int) -> None:
        super().__init__(module)
        self.traits = traits
        self.threads = threads

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != CONV2D:
            return call
        workload, kernel = workload_of(call), array_of(call.args[1])
        if workload is None or kernel is None:
            return call
        choice = choose_winograd(workload, self.traits, self.threads)
        return call if choice is None else self._convolution(call, kernel, choice)

    def _convolution(self, call: relax.Call, kernel: Any, choice: Winograd) -> relax.Expr:
        padding = [int(value) for value in call.attrs.padding]
        weight = transformed_kernel(kernel, choice.outputs)
        return self.builder_.call_te(
            partial(winograd_conv2d, padding=padding, choice=choice, traits=self.traits),
            call.args[0],
            relax.const(weight, str(weight.dtype)),
            primfunc_name_hint="winograd_conv2d",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )


def workload_of(call: relax.Call) -> Workload | None:
    """What a convolution computes, if the method applies to it: float32, 3 x 3, stride, dilation and groups 1."""
    attributes = call.attrs
    data, kernel, result = (static_shape(tensor) for tensor in (call.args[0], call.args[1], call))
    if data is None or kernel is None or result is None or 0 in (*data, *kernel, *result):
        return None
    if (len(data), len(kernel), len(result)) != (5, 6, 5) or kernel[2:4] != (TAPS, TAPS):
        return None
    if int(attributes.groups) != 1 or any(int(step) != 1 for step in (*attributes.strides, *attributes.dilation)):
        return None
    if {str(tensor.ty.dtype) for tensor in (*call.args, call)} != {"float32"}:
        return None
    return Workload(
        batch=data[0],
        input_blocks=data[1],
        output_blocks=kernel[0],
        out_height=result[2],
        out_width=result[3],
        input_lanes=data[4],
        output_lanes=kernel[5],
    )
