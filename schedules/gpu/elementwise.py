"""Schedule functions that only move or map elements: one thread per element."""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.target import Target

from schedules.blocks import inline_into_outputs, new_schedule
from schedules.gpu.default_rules import in_loops
from schedules.gpu.tile import WARP

THREADS = 256


def schedule_elementwise(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Schedule a function without reductions: inline intermediate blocks, make each output a separate kernel."""
    schedule = new_schedule(in_loops(function))
    remaining = inline_into_outputs(schedule, function)
    if remaining is None or not all(block.statement.iter_vars for block in remaining):
        return None  # blocks without axes bind threads themselves
    for block in remaining:
        bind_elements(schedule, block.handle)
    return schedule.mod["main"]


def bind_elements(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> s_tir.schedule.LoopRV:
    """Bind threads along the innermost axis, so that neighbours write neighbouring elements; return their loop."""
    loops = schedule.get_loops(block) or [schedule.add_unit_loop(block)]
    iterations = prod(int(schedule.get(loop).extent) for loop in loops)
    outer, threads = schedule.split(schedule.fuse(*loops), [None, min(THREADS, -(-iterations // WARP) * WARP)])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    return threads


def uses(expression: tirx.Expr, variable: tirx.Var) -> bool:
    return any(variable.same_as(used) for used in tirx.analysis.undefined_vars(expression))
