"""Repairs of element-wise operators at their edges: infinities, zeros, shifts beyond the width."""

from __future__ import annotations

import math
from typing import Any

from tvm import relax

from tvm_split.frontends.exact_arithmetic import floor_remainder, shifted
from tvm_split.frontends.onnx_repair_tools import Builder, Repair, constant, dtype_of


def _is_infinite(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    # TVM's importer ignores both attributes.
    data = inputs[0]
    dtype = dtype_of(data)
    above, below = bool(attributes.get("detect_positive", 1)), bool(attributes.get("detect_negative", 1))
    if above and below:
        return relax.op.equal(builder.emit(relax.op.abs(data)), constant(math.inf, dtype))
    if above or below:
        return relax.op.equal(data, constant(math.inf if above else -math.inf, dtype))
    return relax.op.less(builder.emit(relax.op.abs(data)), constant(0, dtype))


def _modulo(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    left, right = inputs[0], inputs[1]
    if attributes.get("fmod", 0):
        return relax.op.mod(left, right)
    return floor_remainder(builder, left, right)


def _shift(builder: Builder, inputs: Any, attributes: dict[str, Any], opset: int) -> relax.Expr:
    return shifted(builder, inputs[0], inputs[1], attributes["direction"] == b"LEFT")


REPAIRS: dict[str, Repair] = {
    "IsInf": _is_infinite,
    "Mod": _modulo,
    "BitShift": _shift,
}
"""By the operator's name."""
