"""What all legalizations share."""

from __future__ import annotations

from tvm import relax
from tvm.relax import BlockBuilder

OUT_ELEMENTWISE_FUSABLE = 4
"""relax's OpPatternKind: elementwise functions that follow are fused into this one."""


def default_legalization(builder: BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's own lowering of the operator; the call itself where it has none."""
    legalize = call.op.get_attr("FLegalize")
    return call if legalize is None else legalize(builder, call)


def accumulator_dtype(out_dtype: str) -> str:
    """Half precision accumulates in float32: 1000 terms of float16 would lose three digits."""
    return "float32" if out_dtype in ("float16", "bfloat16") else out_dtype
