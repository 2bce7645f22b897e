"""Replace the convolutions over blocked channels that Winograd's method makes faster by its kernels.

The weights are transformed here. They become 4 times (tiles of 4 x 4) or 1.78 times (2 x 2) as large as the kernel, in
memory and in the bundle.
"""

from functools import partial

import tvm
from tvm import relax
from tvm.relax.expr_functor import mutator

from schedules.cpu.winograd_cost import Workload, choose_winograd
from schedules.cpu.winograd_lowering import winograd_conv2d
from schedules.cpu.winograd_matrices import TAPS, transformed_kernel
from schedules.relax_tools import CONV2D, FUSABLE, TraitsMutator, array_of, constant, operator_of, static_shape
from schedules.traits import Traits


@mutator
class UseWinograd(TraitsMutator):
    """Replaces chosen convolutions in blocked layouts by Winograd kernels; the legalization lowers the others."""

    def __init__(self, module: tvm.IRModule, traits: Traits, threads: int) -> None:
        super().__init__(module, traits)
        self.threads = threads

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != CONV2D:
            return call
        workload, kernel = workload_of(call), array_of(call.args[1])
        if workload is None or kernel is None:
            return call
        choice = choose_winograd(workload, self.traits, self.threads)
        if choice is None:
            return call
        padding = [int(value) for value in call.attrs.padding]
        return self.builder_.call_te(
            partial(winograd_conv2d, padding=padding, choice=choice, traits=self.traits),
            call.args[0],
            constant(transformed_kernel(kernel, choice.outputs)),
            primfunc_name_hint="winograd_conv2d",
            primfunc_attrs=FUSABLE,
        )


def workload_of(call: relax.Call) -> Workload | None:
    """The convolution's sizes, or None unless it is float32, 3 x 3, with stride, dilation and groups 1."""
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
    (batch, input_blocks, _, _, input_lanes), (_, output_blocks, height, width, output_lanes) = data, result
    return Workload(batch, input_blocks, output_blocks, height, width, input_lanes, output_lanes)
