"""Products in half precision on tensor cores, by TVM's rule: fragments of 16 x 16 x 16, summed in float32."""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir.dlight.gpu.matmul import MatmulTensorization
from tvm.target import Target

from schedules.blocks import blocks_of, new_schedule
from schedules.gpu.default_rules import apply_default
from schedules.gpu.families import TENSOR_CORE_SMALLEST


def schedule_tensor_core(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """One product of two float16 operands, all extents large enough to fill fragments."""
    blocks = blocks_of(new_schedule(function))
    anchors = [block for block in blocks or [] if block.is_reduction]
    if len(anchors) != 1:
        return None
    reads = anchors[0].statement.reads
    extents = anchors[0].extents[-3:]
    if len(reads) != 2 or any(str(region.source.dtype) != "float16" for region in reads):
        return None
    if min(extents) <= TENSOR_CORE_SMALLEST:
        return None
    return apply_default(MatmulTensorization(), function, target)
