"""Relax-level layouts: channels in blocks of one vector for convolutions, packed columns for constant matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import mutator
from tvm.target import Target

from tvm_split.schedules.blocked_channels import Layouts, carry_blocked_channels
from tvm_split.schedules.constants import array_of
from tvm_split.schedules.legalize.common import OUT_ELEMENTWISE_FUSABLE
from tvm_split.schedules.legalize.matmul import matmul_packed, matmul_with_packing
from tvm_split.schedules.module_mutator import CONV2D, ModuleMutator, is_plain, operator_of, window_of
from tvm_split.schedules.narrow_groups import widen_groups
from tvm_split.schedules.one_dimensional import raise_to_two_dimensions
from tvm_split.schedules.shapes import static_shape
from tvm_split.schedules.traits import Traits, channel_block, is_cpu, threads_of, traits_of
from tvm_split.schedules.use_winograd import use_winograd
from tvm_split.schedules.views import view_of

VIEWS = ("relax.permute_dims", "relax.broadcast_to", "relax.reshape")


def layout_passes(target: Target) -> tuple[Callable[[tvm.IRModule], tvm.IRModule], ...]:
    """For a CPU the passes from plain to blocked layouts, in order; none for other targets.

    They require weights as constants. Run FoldConstant afterwards, before and after LegalizeOps: it computes the layout
    changes of weights.
    """
    if not is_cpu(target):
        return ()
    traits = traits_of(target)
    return (
        raise_to_two_dimensions,
        partial(widen_groups, traits=traits),
        lambda module: _PadOutputChannels(module, traits).transform(),
        partial(carry_blocked_channels, choose=_conv2d_layouts(traits)),
        partial(use_winograd, traits=traits, threads=threads_of(target)),
        lambda module: _PackMatmul(module, traits).transform(),
    )


def _conv2d_layouts(traits: Traits) -> Callable[[relax.Call], Layouts | None]:
    """Data, kernel and output layout for a convolution; None to leave it as it is."""

    def layouts(call: relax.Call) -> Layouts | None:
        data, weight = (static_shape(argument) for argument in call.args)
        if data is None or weight is None or array_of(call.args[1]) is None or not is_plain(call):
            return None
        groups = int(call.attrs.groups)
        inputs, outputs = data[1], weight[0]
        output_block = channel_block(outputs, traits)
        if output_block is None:
            return None
        if groups == inputs == outputs:
            return f"NCHW{output_block}c", f"OIHW{output_block}o", f"NCHW{output_block}c"
        input_block = channel_block(inputs // groups, traits)
        if groups != 1:
            output_block = channel_block(outputs // groups, traits)
            if input_block is None or output_block is None:
                return None
        if input_block is None:
            return "NCHW", f"OIHW{output_block}o", f"NCHW{output_block}c"
        return f"NCHW{input_block}c", f"OIHW{input_block}i{output_block}o", f"NCHW{output_block}c"

    return layouts


@mutator
class _PadOutputChannels(ModuleMutator):
    """A convolution to a number of channels that no block divides computes some more, and drops them.

    A detector's last layer, 256 to 255 channels of 26 x 26, takes 0.74 ms like this and 43 ms in plain NCHW.
    """

    def __init__(self, module: tvm.IRModule, traits: Traits) -> None:
        super().__init__(module)
        self.traits = traits

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != CONV2D or int(call.attrs.groups) != 1:
            return call
        weight = array_of(call.args[1])
        if weight is None or static_shape(call.args[0]) is None or not is_plain(call):
            return call
        channels = weight.shape[0]
        if channel_block(channels, self.traits) is not None:
            return call
        half = self.traits.lanes // 2
        block = half if channels <= half and channel_block(half, self.traits) == half else self.traits.lanes
        padded = np.zeros((-(-channels // block) * block, *weight.shape[1:]), weight.dtype)
        padded[:channels] = weight
        whole = relax.op.nn.conv2d(call.args[0], relax.const(padded, str(padded.dtype)), **window_of(call))
        padded_result = self.emit_beside(whole, "padded")
        return relax.op.strided_slice(padded_result, axes=[1], begin=[0], end=[channels])


@mutator
class _PackMatmul(ModuleMutator):
    """Matrix products read views in place, and constants as [N / lanes, K, lanes]."""

    def __init__(self, module: tvm.IRModule, traits: Traits) -> None:
        super().__init__(module)
        self.traits = traits
        self._packed: dict[tuple[Any, ...], relax.Expr] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator_of(call) != "relax.matmul":
            return call
        left, right = call.args
        left_shape, right_shape = static_shape(left), static_shape(right)
        if left_shape is None or right_shape is None or len(left_shape) < 2 or 0 in (*left_shape, *right_shape):
            return call
        matrix = self._constant(right)
        # A matrix that the importer broadcast over the batch is still one matrix: numpy gives it strides of zero.
        while matrix is not None and matrix.ndim > 2 and (matrix.shape[0] == 1 or matrix.strides[0] == 0):
            matrix = matrix[0]
        # Rows of the left operand are read one element of a run after the other, for many columns at once.
        left_view = view_of(left, self.lookup_binding, smallest_run=self.traits.lanes)
        dtype = str(call.ty.dtype)
        if matrix is not None and matrix.ndim == 2 and len(right_shape) <= len(left_shape):
            return self._product(
                lambda a, b: matmul_packed(left_view.tensor(a), b, right_shape[-1], dtype, self.traits),
                left_view.source,
                self._pack(matrix),
            )
        if len(right_shape) < 2 or matrix is not None:
            return call
        right_view = view_of(right, self.lookup_binding)
        if left_view.is_copy and right_view.is_copy:
            return call
        return self._product(
            lambda a, b: matmul_with_packing(left_view.tensor(a), right_view.tensor(b), dtype, self.traits),
            left_view.source,
            right_view.source,
        )

    def _product(self, compute: Callable[..., te.Tensor], left: relax.Expr, right: relax.Expr) -> relax.Expr:
        pattern = {"op_pattern": OUT_ELEMENTWISE_FUSABLE}
        return self.builder_.call_te(compute, left, right, primfunc_name_hint="matmul", primfunc_attrs=pattern)

    def _constant(self, expression: relax.Expr) -> Any:
        """The numpy array an expression stands for: a constant, or a view of one; None otherwise."""
        if isinstance(expression, relax.Var):
            bound = self.lookup_binding(expression)
            return None if bound is None else self._constant(bound)
        if isinstance(expression, tvm.ir.GenericConst):
            return array_of(expression)
        if not isinstance(expression, relax.Call) or not isinstance(expression.op, tvm.ir.Op):
            return None
        name, shape = str(expression.op.name), static_shape(expression)
        if shape is None or name not in VIEWS:
            return None
        source = self._constant(expression.args[0])
        if source is None:
            return None
        if name == "relax.permute_dims":
            axes = expression.attrs.axes
            return source.transpose(None if axes is None else [int(axis) for axis in axes])
        if name == "relax.broadcast_to":
            return np.broadcast_to(source, shape)
        if source.shape == shape:
            return source
        # numpy's reshape may copy, and with it lose the zero strides of a broadcast.
        return source.reshape(shape) if 0 not in source.strides else None

    def _pack(self, matrix: Any) -> relax.Expr:
        key = (matrix.__array_interface__["data"][0], matrix.shape, matrix.strides)
        if key not in self._packed:
            depth, columns = matrix.shape
            lanes = self.traits.lanes
            blocks = -(-columns // lanes)
            packed = np.zeros((blocks, depth, lanes), matrix.dtype)
            whole = columns // lanes
            packed[:whole] = matrix[:, : whole * lanes].reshape(depth, whole, lanes).transpose(1, 0, 2)
            if whole < blocks:
                packed[whole, :, : columns - whole * lanes] = matrix[:, whole * lanes :]
            self._packed[key] = relax.const(packed, str(packed.dtype))
        return self._packed[key]
