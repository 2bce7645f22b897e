"""Cancel layout changes that ConvertLayout left in pairs, and compute those of constants.

TVM 0.27's ConvertLayout does not carry a layout through every elementwise operator (clip, erf, arithmetic with a
scalar): it leaves ``block(op(unblock(x)))``. Here an elementwise operator moves in front of ``unblock``, and the pair
cancels. In MobileNetV2 that removes two copies of the image per ReLU6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.shapes import static_shape

LAYOUT_TRANSFORM = "relax.layout_transform"
ELEMENTWISE = "abs astype ceil clip cos erf exp floor log negative round rsqrt sigmoid sin sqrt square tanh"
ACTIVATIONS = "relu leakyrelu gelu gelu_tanh selu silu softplus relu6"
UNARY = frozenset(
    [*(f"relax.{name}" for name in ELEMENTWISE.split()), *(f"relax.nn.{name}" for name in ACTIVATIONS.split())]
)
NUMPY_TYPES = frozenset(["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64"])
BINARY = frozenset(f"relax.{name}" for name in ["add", "subtract", "multiply", "divide", "maximum", "minimum", "power"])


def cancel_layout_transforms(module: tvm.IRModule) -> tvm.IRModule:
    """Every Relax function with fewer layout changes, and none of a constant."""
    module = _MoveLayoutTransforms(module).transform()
    return relax.transform.DeadCodeElimination()(module)


def array_of(expression: relax.Expr) -> Any:
    """A constant's numpy array, not copied; None for other expressions, and for types numpy does not have."""
    if not isinstance(expression, tvm.ir.GenericConst) or not isinstance(expression.value, tvm.runtime.Tensor):
        return None
    if str(expression.value.dtype) not in NUMPY_TYPES:
        return None
    return np.from_dlpack(expression.value)


def _axis_split(index_map: Any) -> tuple[str, int, int] | None:
    """("block" | "unblock", channel axis, block) of ``C -> C/block, ..., block`` and back; None for other maps."""
    initial = list(index_map.initial_indices)
    final = list(index_map.final_indices)
    if len(final) == len(initial) + 1:
        last = final[-1]
        if not isinstance(last, tirx.FloorMod) or not isinstance(last.b, tirx.IntImm):
            return None
        block = int(last.b)
        axes = [axis for axis, variable in enumerate(initial) if variable.same_as(last.a)]
        if len(axes) != 1:
            return None
        axis = axes[0]
        for position, variable in enumerate(initial):
            value = final[position]
            if position != axis:
                if not variable.same_as(value):
                    return None
            elif not (isinstance(value, tirx.FloorDiv) and value.a.same_as(variable) and _is(value.b, block)):
                return None
        return "block", axis, block
    if len(final) == len(initial) - 1:
        lane = initial[-1]
        found: tuple[str, int, int] | None = None
        for position, value in enumerate(final):
            if value.same_as(initial[position]):
                continue
            if found is not None or not isinstance(value, tirx.Add) or not value.b.same_as(lane):
                return None
            product = value.a
            if not isinstance(product, tirx.Mul) or not product.a.same_as(initial[position]):
                return None
            if not isinstance(product.b, tirx.IntImm):
                return None
            found = "unblock", position, int(product.b)
        return found
    return None


def _is(expression: Any, value: int) -> bool:
    return isinstance(expression, tirx.IntImm) and int(expression) == value


@mutator
class _MoveLayoutTransforms(PyExprMutator):  # type: ignore[misc]
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.module = module

    def transform(self) -> tvm.IRModule:
        for variable, function in self.module.functions_items():
            if isinstance(function, relax.Function):
                self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not isinstance(call.op, tvm.ir.Op):
            return call
        name = str(call.op.name)
        if name == LAYOUT_TRANSFORM:
            return self._layout_transform(call)
        if name in UNARY:
            return self._sink(call, [0])
        if name in BINARY and len(call.args) == 2:
            scalars = [static_shape(argument) == () for argument in call.args]
            return self._sink(call, [position for position, scalar in enumerate(scalars) if not scalar])
        return call

    def _bound(self, expression: relax.Expr) -> relax.Expr | None:
        return self.lookup_binding(expression) if isinstance(expression, relax.Var) else expression

    def _layout_change(self, expression: relax.Expr) -> tuple[relax.Call, tuple[str, int, int]] | None:
        bound = self._bound(expression)
        if not isinstance(bound, relax.Call) or not isinstance(bound.op, tvm.ir.Op):
            return None
        if bound.op.name != LAYOUT_TRANSFORM or bound.attrs.pad_value is not None:
            return None
        split = _axis_split(bound.attrs.index_map)
        return None if split is None else (bound, split)

    def _layout_transform(self, call: relax.Call) -> relax.Expr:
        source = call.args[0]
        array = array_of(source)
        if array is not None:
            constant = self._blocked_constant(call, array)
            return call if constant is None else constant
        outer = self._layout_change(call)
        inner = self._layout_change(source)
        if outer is None or inner is None:
            return call
        (_, axis, block), (before, (kind, inner_axis, inner_block)) = outer[1], inner
        if outer[1][0] == "block" and kind == "unblock" and (axis, block) == (inner_axis, inner_block):
            return before.args[0]
        return call

    def _sink(self, call: relax.Call, positions: list[int]) -> relax.Expr:
        """``op(unblock(x), scalar)`` as ``unblock(op(x, scalar))``, if all tensors were unblocked in the same way."""
        changes = [self._layout_change(call.args[position]) for position in positions]
        if not changes or any(change is None or change[1][0] != "unblock" for change in changes):
            return call
        known = [change for change in changes if change is not None]
        sources = [change[0].args[0] for change in known]
        if len({change[1] for change in known}) != 1 or len({static_shape(source) for source in sources}) != 1:
            return call
        arguments = list(call.args)
        for position, source in zip(positions, sources, strict=True):
            arguments[position] = source
        inner = self.builder_.emit(relax.Call(call.op, arguments, call.attrs, call.ty_args))
        unblock = known[0][0]
        return relax.Call(unblock.op, [inner], unblock.attrs, unblock.ty_args)

    def _blocked_constant(self, call: relax.Call, array: Any) -> relax.Expr | None:
        """The constant in its new layout, when every axis of it is an axis of the old, a quotient or a remainder."""
        index_map = call.attrs.index_map
        initial = list(index_map.initial_indices)
        if call.attrs.pad_value is not None:
            return None
        divisors: dict[int, int] = {}
        order: list[tuple[int, str]] = []
        for value in index_map.final_indices:
            whole = [axis for axis, variable in enumerate(initial) if variable.same_as(value)]
            if whole:
                order.append((whole[0], "whole"))
                continue
            if not isinstance(value, tirx.FloorDiv | tirx.FloorMod) or not isinstance(value.b, tirx.IntImm):
                return None
            part = [axis for axis, variable in enumerate(initial) if variable.same_as(value.a)]
            if not part or divisors.setdefault(part[0], int(value.b)) != int(value.b):
                return None
            order.append((part[0], "quotient" if isinstance(value, tirx.FloorDiv) else "remainder"))
        shape: list[int] = []
        places: dict[tuple[int, str], int] = {}
        for axis, extent in enumerate(array.shape):
            if axis in divisors:
                if extent % divisors[axis]:
                    return None
                places[axis, "quotient"], places[axis, "remainder"] = len(shape), len(shape) + 1
                shape += [extent // divisors[axis], divisors[axis]]
            else:
                places[axis, "whole"] = len(shape)
                shape.append(extent)
        if len(set(order)) != len(places) or set(order) != set(places):
            return None
        moved = np.ascontiguousarray(array.reshape(shape).transpose([places[key] for key in order]))
        return relax.const(moved, str(moved.dtype))
