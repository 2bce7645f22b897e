"""Keep tensors in a blocked channel layout from convolution to convolution, so that the layout seldom changes.

A convolution needs NCHW[x]c: channels in blocks of one vector, with the block as the innermost axis. Its result stays
in this layout, and the operators below that can work on blocks do so. Other operators and the function's end get the
tensor converted back, once. All decisions are local and follow the order of the bindings. Operators that are not named
here are not changed.

TVM's ConvertLayout was used before. In 0.27 it fails on stack, on the tuple that dropout returns and on group norm. It
also changes layouts around clip, erf and arithmetic with scalars.
"""

import math
from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.tirx import IndexMap

from schedules.relax_tools import (
    CONV2D,
    ORIGINS_ATTRIBUTE,
    array_of,
    constant,
    is_plain,
    operator_of,
    origins_of,
    pool_of,
    static_shape,
    window_of,
)
from schedules.traits import Traits, channel_block

UNARY = frozenset(
    f"relax.{name}"
    for name in (
        "abs", "astype", "ceil", "clip", "cos", "dequantize", "erf", "exp", "floor", "log", "negative", "quantize",
        "round", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh", "nn.relu", "nn.leakyrelu", "nn.gelu",
        "nn.gelu_tanh", "nn.selu", "nn.silu", "nn.softplus", "nn.relu6",
    )
)  # fmt: skip
BINARY = frozenset(f"relax.{name}" for name in ["add", "subtract", "multiply", "divide", "maximum", "minimum", "power"])
IMAGE_AXES = frozenset((0, 2, 3))
"""These axes keep their positions in the blocked layout."""
POOLS = frozenset(f"relax.nn.{name}" for name in ("max_pool2d", "avg_pool2d"))


def carry_blocked_channels(module: tvm.IRModule, traits: Traits) -> tvm.IRModule:
    """Return the module with blocked convolutions in all Relax functions, where `_blocks_of` chooses them."""
    updated = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs, global_infos=module.global_infos)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function):
            updated[variable] = _Carrier(traits, origins_of(function)).rewritten(function)
    return relax.transform.DeadCodeElimination()(updated)


def _blocks_of(call: relax.Call, traits: Traits) -> tuple[int | None, int] | None:
    """Return the block sizes of a convolution's input (None: plain) and output channels; None to keep it unchanged."""
    data, weight = (static_shape(argument) for argument in call.args)
    if data is None or weight is None or array_of(call.args[1]) is None or not is_plain(call):
        return None
    groups, inputs, outputs = int(call.attrs.groups), data[1], weight[0]
    output_block = channel_block(outputs if groups in (1, inputs) else outputs // groups, traits)
    input_block = output_block if groups == inputs == outputs else channel_block(inputs // groups, traits)
    if output_block is None or (groups != 1 and input_block is None):
        return None
    return input_block, output_block


class _Carrier:
    """Rewrites a function; holds the plain form, the blocked form, or both, of each of its variables."""

    def __init__(self, traits: Traits, origins: dict[str, str]) -> None:
        self._traits = traits
        self._origins = origins
        self._builder = relax.BlockBuilder()
        # Keyed by the variable's hash, which is its identity: names need not be unique.
        self._plain: dict[int, relax.Expr] = {}
        self._blocked: dict[int, tuple[relax.Var, int]] = {}

    def rewritten(self, function: relax.Function) -> relax.Function:
        result = function.body.body
        with self._builder.function("main", list(function.params)):
            with self._builder.dataflow():
                for parameter in function.params:
                    self._plain[hash(parameter)] = parameter
                for block in function.body.blocks:
                    for binding in block.bindings:
                        if not (isinstance(result, relax.Var) and binding.var.same_as(result)):
                            self._rewrite(binding)
                        else:
                            result = binding.value
                returned = self._builder.emit_output(self._with_plain_operands(result))
            self._builder.emit_func_output(returned)
        rewritten = self._builder.get()["main"]
        if function.attrs is not None:
            rewritten = rewritten.with_attrs(function.attrs)
        return rewritten.with_attr(ORIGINS_ATTRIBUTE, self._origins)

    def _emit(self, expression: relax.Expr, name: str, origin: str) -> relax.Var:
        """Emit a binding that stands for ``origin``, under ``name`` or, if that is taken, a similar name."""
        variable = self._builder.emit(expression, name_hint=name)
        if variable.name != origin:
            self._origins[variable.name] = self._origins.get(origin, origin)
        return variable

    def _rewrite(self, binding: relax.VarBinding) -> None:
        name, value = binding.var.name, binding.value
        identity = hash(binding.var)
        size = _block_of_change(value)
        if size is not None and _same_map(value, to_blocks(size)):
            self._plain[identity] = self._blocked_as(value.args[0], size)
            return
        if size is not None and _same_map(value, from_blocks(size)):
            self._blocked[identity] = self._plain_form(value.args[0]), size
            return
        blocked = self._on_blocks(value) if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else None
        if blocked is None:
            self._plain[identity] = self._emit(self._with_plain_operands(value), name, name)
        else:
            call, size = blocked
            self._blocked[identity] = self._emit(call, name, name), size

    def _on_blocks(self, call: relax.Call) -> tuple[relax.Call, int] | None:
        """Return the call on blocked operands and its result's block size; None if it needs plain operands."""
        operator = str(call.op.name)
        if operator == CONV2D:
            return self._convolution(call)
        has_numbers = all(math.prod(static_shape(operand) or ()) == 1 for operand in call.args[1:])
        if (operator in UNARY and has_numbers) or (
            operator == "relax.strided_slice" and _axes_of_slice(call) <= IMAGE_AXES
        ):
            source = self._blocked_form(call.args[0])
            return None if source is None else (_call(call, [source[0], *call.args[1:]]), source[1])
        if operator in BINARY:
            return self._binary(call)
        if operator in POOLS and str(call.attrs.layout) == "NCHW" and str(call.attrs.out_layout) in ("", "NCHW"):
            return self._pool(call)
        if operator == "relax.concat":
            return self._concat(call)
        if operator == "relax.mean" and call.attrs.keepdims and call.attrs.axis is not None:
            source = self._blocked_form(call.args[0])
            if source is not None and sorted(int(axis) % 4 for axis in call.attrs.axis) == [2, 3]:
                return relax.op.mean(source[0], axis=[2, 3], keepdims=True), source[1]
        return None

    def _convolution(self, call: relax.Call) -> tuple[relax.Call, int] | None:
        blocks, kernel = _blocks_of(call, self._traits), array_of(call.args[1])
        if blocks is None:
            return None
        input_size, size = blocks
        data = self._plain_form(call.args[0]) if input_size is None else self._blocked_as(call.args[0], input_size)
        # With one input channel per group, the weight has no input block.
        weight_size = input_size if kernel.shape[1] != 1 or int(call.attrs.groups) == 1 else None
        # [O, I, H, W] becomes [O/o, I/i, H, W, i, o], or without an input block [O/o, I, H, W, o].
        weight = kernel if weight_size is None else _in_blocks(kernel, 1, weight_size)
        convolution = relax.op.nn.conv2d(
            data,
            constant(np.ascontiguousarray(_in_blocks(weight, 0, size))),
            groups=call.attrs.groups,
            data_layout="NCHW" if input_size is None else f"NCHW{input_size}c",
            kernel_layout=f"OIHW{size}o" if weight_size is None else f"OIHW{weight_size}i{size}o",
            out_layout=f"NCHW{size}c",
            **window_of(call),
        )
        return convolution, size

    def _binary(self, call: relax.Call) -> tuple[relax.Call, int] | None:
        forms = [self._blocked_form(argument) for argument in call.args]
        sizes = {form[1] for form in forms if form is not None}
        if len(sizes) != 1:
            return None
        (size,) = sizes
        whole = static_shape(call)
        operands: list[relax.Expr] = []
        for argument, form in zip(call.args, forms, strict=True):
            operand = form[0] if form is not None else self._fitting_operand(argument, whole, size)
            if operand is None:
                return None
            operands.append(operand)
        return _call(call, operands), size

    def _fitting_operand(self, argument: relax.Expr, whole: Sequence[int] | None, size: int) -> relax.Expr | None:
        """Return a plain operand made to fit a blocked one; None for other shapes.

        Scalars stay; constant channel vectors and tensors of the shape ``whole`` are blocked.
        """
        shape = static_shape(argument)
        if shape is None or whole is None or len(whole) != 4:
            return None
        if not any(length != 1 for length in shape):
            return self._plain_form(argument)
        array = array_of(argument)
        if array is not None and len(shape) in (3, 4):
            array = array.reshape((1,) * (4 - array.ndim) + array.shape)
            if array.shape[1] == whole[1]:
                return constant(np.ascontiguousarray(_in_blocks(array, 1, size)))
            return None
        return self._blocked_as(argument, size) if tuple(shape) == tuple(whole) else None

    def _pool(self, call: relax.Call) -> tuple[relax.Call, int] | None:
        source = self._blocked_form(call.args[0])
        if source is None:
            return None
        layout = f"NCHW{source[1]}c"
        pool = relax.op.nn.max_pool2d if call.op.name == "relax.nn.max_pool2d" else relax.op.nn.avg_pool2d
        return pool(source[0], **pool_of(call), layout=layout, out_layout=layout), source[1]

    def _concat(self, call: relax.Call) -> tuple[relax.Call, int] | None:
        parts = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else ()
        forms = [self._blocked_form(part) for part in parts]
        blocked = [form for form in forms if form is not None]
        if not blocked or len(blocked) != len(forms) or len({size for _, size in blocked}) != 1:
            return None
        if call.attrs.axis is None:
            return None
        return relax.op.concat([variable for variable, _ in blocked], axis=int(call.attrs.axis) % 4), blocked[0][1]

    def _blocked_form(self, expression: relax.Expr) -> tuple[relax.Var, int] | None:
        return self._blocked.get(hash(expression)) if isinstance(expression, relax.Var) else None

    def _blocked_as(self, expression: relax.Expr, size: int) -> relax.Expr:
        """Return the form of a tensor in blocks of ``size`` channels; the first one that is built is kept."""
        existing = self._blocked_form(expression)
        if existing is not None and existing[1] == size:
            return existing[0]
        plain = self._plain_form(expression)
        blocked = self._builder.emit(relax.op.layout_transform(plain, to_blocks(size)), name_hint="blocked")
        if isinstance(expression, relax.Var) and existing is None:
            self._blocked[hash(expression)] = blocked, size
        return blocked

    def _plain_form(self, expression: relax.Expr) -> relax.Expr:
        """Return the plain form of a tensor; it is built where it is first needed."""
        identity = hash(expression) if isinstance(expression, relax.Var) else None
        if identity is None or (identity not in self._plain and identity not in self._blocked):
            return expression
        if identity not in self._plain:
            blocked, size = self._blocked[identity]
            change = relax.op.layout_transform(blocked, from_blocks(size))
            self._plain[identity] = self._emit(change, f"{expression.name}_plain", expression.name)
        return self._plain[identity]

    def _with_plain_operands(self, expression: relax.Expr) -> relax.Expr:
        return tvm_ffi.structural_map(expression, ((relax.Var, relax.DataflowVar), self._plain_form))


def _axes_of_slice(call: relax.Call) -> set[int]:
    axes = call.args[1]
    return {int(axis) for axis in axes.fields} if isinstance(axes, relax.Tuple) else {-1}


def to_blocks(size: int) -> IndexMap:
    return IndexMap.from_func(lambda n, c, h, w: (n, c // size, h, w, c % size))


def from_blocks(size: int) -> IndexMap:
    return IndexMap.from_func(lambda n, c, h, w, lane: (n, c * size + lane, h, w))


def _block_of_change(expression: relax.Expr) -> int | None:
    """Return the block size if the expression may be a conversion to or from blocks, else None."""
    if operator_of(expression) != "relax.layout_transform":
        return None
    before, after = static_shape(expression.args[0]), static_shape(expression)
    if before is None or after is None or expression.attrs.pad_value is not None:
        return None
    if {len(before), len(after)} != {4, 5}:
        return None
    return int(max(before, after, key=len)[-1])


def _same_map(change: relax.Call, index_map: IndexMap) -> bool:
    return bool(tvm_ffi.structural_equal(change.attrs.index_map, index_map, map_free_vars=True))


def _call(call: relax.Call, operands: Sequence[relax.Expr]) -> relax.Call:
    return relax.Call(call.op, list(operands), call.attrs, call.ty_args)


def _in_blocks(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Divide an axis into blocks of ``size``, which become the last axis: [N, C, H, W] to [N, C / size, H, W, size]."""
    blocks = array.reshape(*array.shape[:axis], -1, size, *array.shape[axis + 1 :])
    return np.moveaxis(blocks, axis + 1, -1)
