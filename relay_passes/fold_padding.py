"""Fold padding: turn a border of zeros around a convolution's data into the convolution's own padding.

    conv(pad(x, w), W, padding=p)  ──▶  conv(x, W, padding=p + w)

Requires: channels first.
Ensures: no convolution reads a tensor that was only padded with zeros along its spatial axes. Keras pads its
convolutions of stride 2 in this way, since their borders differ on the two sides. A separate padding kernel costs as
much as reading and writing the data once more.
"""

import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from relay_passes.ir import PLAIN_LAYOUTS, call_like, operator_name, rewrite_main


@tvm.transform.module_pass(opt_level=0, name="FoldPadding")  # type: ignore[untyped-decorator]
def fold_padding(module: tvm.IRModule, _: PassContext) -> tvm.IRModule:
    """Fold borders of zeros into the convolutions behind them, in the function ``main``."""
    bordered: dict[str, tuple[relax.Expr, list[int]]] = {}

    def replacement(name: str, expression: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
        widths = _border(expression)
        if widths is not None:
            variable = builder.emit(expression, name_hint=name)
            bordered[variable.name] = (expression.args[0], widths)
            return variable
        data = getattr(expression.args[0], "name", "") if operator_name(expression) in PLAIN_LAYOUTS else ""
        folded = _folded(expression, *bordered[data]) if data in bordered else None
        return None if folded is None else builder.emit(folded, name_hint=name)

    return relax.transform.DeadCodeElimination(["main"])(rewrite_main(module, replacement))


def _border(expression: relax.Expr) -> list[int] | None:
    """Return the widths before and after each spatial axis; None if the expression is not a pad of these with zeros."""
    if operator_name(expression) != "relax.nn.pad":
        return None
    attributes = expression.attrs
    widths = [int(width) for width in attributes.pad_width]
    is_zeros = str(attributes.pad_mode) == "constant" and float(attributes.pad_value) == 0
    return widths[4:] if is_zeros and not any(widths[:4]) and min(widths) >= 0 else None


def _folded(call: relax.Call, data: relax.Expr, widths: list[int]) -> relax.Call | None:
    attributes = call.attrs
    if str(attributes.data_layout) != PLAIN_LAYOUTS[operator_name(call)][0]:
        return None
    border = [*widths[::2], *widths[1::2]]
    call_padding = [int(width) for width in attributes.padding]
    padding = [width + extra for width, extra in zip(call_padding, border, strict=True)]
    return call_like(call, (data, call.args[1]), padding=padding)
