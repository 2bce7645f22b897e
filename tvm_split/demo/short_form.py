"""Print a machine's IR in a short, readable form: what it receives, computes and sends.

    def stage_0():  # on machine-a
        images = receive("images", "client")                # float32[8, 3, 8, 8]
        conv1 = nn.conv2d(images, constant[16, 3, 3, 3])    # float32[8, 16, 8, 8]
        send(conv1, "machine-b")

Every line is one binding of the IR, in its order and with its names. Operators' attributes, devices and the values of
constants are left out.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from relay_passes.communication import RECEIVE, SEND
from relay_passes.ir import bindings_of

COMMENT_COLUMN = 52


def short_form(module: tvm.IRModule) -> str:
    """Return the short form of all stages in one machine's module with send and receive calls."""
    lines: list[str] = []
    for variable, function in module.functions_items():
        lines.append(f"def {variable.name_hint}():  # on {function.attrs['machine']}")
        for binding in bindings_of(function):
            line = _line(binding)
            if line is not None:
                lines.append("    " + line)
    return "\n".join(lines)


def _line(binding: relax.VarBinding) -> str | None:
    value = binding.value
    if isinstance(value, relax.Tuple) and not value.fields:
        return None  # a stage sends its results and returns nothing
    text, kind = _text(value), _type_text(binding.var.ty)
    if not kind:
        return text
    return f"{binding.var.name} = {text} ".ljust(COMMENT_COLUMN) + f"# {kind}"


def _text(value: relax.Expr) -> str:
    if isinstance(value, tvm.ir.GenericConst):
        return f"constant{_shape_text(value.ty)}"
    if isinstance(value, relax.ShapeExpr):
        return _sizes_text(value)
    if isinstance(value, relax.Tuple):
        return f"({', '.join(_text(field) for field in value.fields)})"
    if isinstance(value, relax.TupleGetItem):
        return f"{_text(value.tuple_value)}[{value.index}]"
    if isinstance(value, relax.Var):
        return str(value.name)
    if isinstance(value, tirx.IntImm):
        return str(int(value))  # str() of TVM's own integers gives T.int64(8)
    if not isinstance(value, relax.Call):
        return str(value)
    if isinstance(value.op, relax.ExternFunc):
        symbol = str(value.op.global_symbol)
        if symbol == RECEIVE:
            tensor, source = (str(argument.value) for argument in value.args)
            return f'receive("{tensor}", "{source}")'
        if symbol == SEND:
            return f'send({_text(value.args[0])}, "{value.args[2].value}")'
        return f"{symbol}({', '.join(_text(argument) for argument in value.args)})"
    operator = str(getattr(value.op, "name", value.op)).removeprefix("relax.")
    return f"{operator}({', '.join(_text(argument) for argument in value.args)})"


def _type_text(kind: relax.Type) -> str:
    if isinstance(kind, relax.TensorType):
        return f"{kind.dtype}{_shape_text(kind)}"
    if isinstance(kind, relax.TupleType) and kind.fields:
        return f"({', '.join(_type_text(field) for field in kind.fields)})"
    return ""


def _shape_text(kind: relax.Type) -> str:
    shape = getattr(kind, "shape", None)
    return _sizes_text(shape) if isinstance(shape, relax.ShapeExpr) else ""


def _sizes_text(shape: relax.ShapeExpr) -> str:
    return f"[{', '.join(_text(size) for size in shape.values)}]"
