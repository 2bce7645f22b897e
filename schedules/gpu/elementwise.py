"""Schedule functions that only move or map elements: one thread per element, or per four contiguous elements."""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.blocks import inline_into_outputs, new_schedule
from schedules.gpu.default_rules import in_loops

THREADS = 256
LANES = 4
# With fewer elements, vectors would leave multiprocessors without threads.
SMALLEST_VECTORIZED = 1 << 17


def schedule_elementwise(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Schedule a function without reductions: inline intermediate blocks, make each output a separate kernel."""
    schedule = new_schedule(in_loops(function))
    remaining = inline_into_outputs(schedule, function)
    if remaining is None or not all(block.statement.iter_vars for block in remaining):
        return None  # blocks without axes bind threads themselves
    for block in remaining:
        bind_elements(schedule, block.handle)
    return schedule.mod["main"]


def bind_elements(
    schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, vectorize: bool = True
) -> s_tir.schedule.LoopRV:
    """Bind threads along the innermost axis, so that neighbours write neighbouring elements; return their loop."""
    loops = schedule.get_loops(block)
    if not loops:
        loops = [schedule.add_unit_loop(block)]
    extents = [int(schedule.get(loop).extent) for loop in loops]
    iterations = prod(extents)
    vectorized = (
        vectorize
        and extents[-1] % LANES == 0
        and iterations >= SMALLEST_VECTORIZED
        and _is_contiguous(schedule.get(block))
    )
    fused = schedule.fuse(*loops)
    if vectorized:
        outer, threads, lanes = schedule.split(fused, [None, THREADS, LANES])
        schedule.vectorize(lanes)
    else:
        outer, threads = schedule.split(fused, [None, min(THREADS, _warps(iterations))])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    return threads


def _warps(iterations: int) -> int:
    return -(-iterations // 32) * 32


def _is_contiguous(block: s_tir.SBlock) -> bool:
    """Whether everything read and written is contiguous along the innermost iterator, or is one value."""
    innermost = block.iter_vars[-1].var
    for region in [*block.reads, *block.writes]:
        indices = [bounds.min for bounds in region.region]
        if any(not _is_one(bounds.extent) for bounds in region.region):
            return False
        if any(uses(index, innermost) for index in indices[:-1]):
            return False
        if indices and uses(indices[-1], innermost) and not indices[-1].same_as(innermost):
            return False
    return True


def _is_one(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def uses(expression: tirx.Expr, variable: tirx.Var) -> bool:
    return any(variable.same_as(used) for used in tirx.analysis.undefined_vars(expression))
