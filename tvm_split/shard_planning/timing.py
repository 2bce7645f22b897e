"""Measure the parts of sharded plans in their own shapes, on the machines that would compute them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm import tirx

import schedules
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.model import Model
from tvm_split.planner.plan import Plan
from tvm_split.planner.step_graph import Step, StepGraph
from tvm_split.profiling.kernel_timing import time_kernels
from tvm_split.profiling.kernels import KernelCall, TargetCode, scheduled_calls, shared_weight_bytes, untimeable_in
from tvm_split.profiling.machine_times import CallSeconds
from tvm_split.profiling.machines import MachineFacts
from tvm_split.progress import StepProgress
from tvm_split.shard_planning.estimates import PartEstimates, transfers_of


def profile_parts(
    model: Model,
    plans: Sequence[Plan],
    cluster: Workers,
    estimates: PartEstimates,
    *,
    database: str | Path | None = None,
    refresh: bool = False,
    on_progress: StepProgress | None = None,
) -> tuple[StepGraph, ...]:
    """The measured steps of each plan: their kernels are compiled as for a deployment and cached like those of pieces.

    Kernels that cannot be measured are estimated, as in a profile. ``estimates`` says which steps run under contention.
    Other arguments, and errors, are those of `time_kernels`.
    """
    scheduled = [_ScheduledPlan(model, plan, open_database(database)) for plan in plans]
    times = time_kernels(
        f"parts of {model.name}",
        lambda machine: _code(scheduled, machine),
        cluster,
        refresh=refresh,
        on_progress=on_progress,
    )
    used = {machine for plan in scheduled for machine in plan.machines()}
    seconds = {time.machine.name: CallSeconds(time) for time in times if time.machine.name in used}
    return tuple(
        StepGraph(
            tuple(
                _timed(plan, step, seconds[step.machines[0]], estimates, origin)
                for step, origin in zip(estimates.steps(plan.placed, plan.plan), plan.placed.origins, strict=True)
            ),
            transfers_of(plan.placed),
        )
        for plan in scheduled
    )


@dataclass(frozen=True)
class _Calls:
    calls: tuple[KernelCall, ...]
    functions: Mapping[str, tirx.PrimFunc]


class _ScheduledPlan:
    """A plan whose stages are partitioned; the kernels of a stage are scheduled for its machine on first use."""

    def __init__(self, model: Model, plan: Plan, database: schedules.TunedKernels | None) -> None:
        self.plan = plan
        self.placed = partition(model, plan)
        self._database = database
        self._scheduled: dict[str, _Calls] = {}

    def machines(self) -> Iterable[str]:
        return dict.fromkeys(stage.machine for stage in self.placed.plan.stages)

    def calls_on(self, machine: str) -> list[_Calls]:
        return [self.calls_of(stage.name) for stage in self.placed.plan.stages if stage.machine == machine]

    def calls_of(self, stage: str) -> _Calls:
        if stage not in self._scheduled:
            placed, computation = next(part for part in self.placed.parts if part[0].name == stage)
            layers, target = computation.layers(self.placed.model.layers), self.plan.machine(placed.machine).target
            self._scheduled[stage] = _Calls(*scheduled_calls(computation.function, target, layers, self._database))
        return self._scheduled[stage]


def _code(plans: Sequence[_ScheduledPlan], facts: MachineFacts) -> TargetCode:
    """The kernels of all parts on machines of one target; each machine of that target measures all of them."""
    calls: list[KernelCall] = []
    functions: dict[str, tirx.PrimFunc] = {}
    weight_bytes = 0
    for plan in plans:
        for machine in plan.machines():
            if plan.plan.machine(machine).target == facts.target:
                parts = plan.calls_on(machine)
                calls += [call for part in parts for call in part.calls]
                weight_bytes = max(weight_bytes, sum(shared_weight_bytes(part.calls) for part in parts))
                for part in parts:
                    functions.update(part.functions)
    return TargetCode(facts.target, tuple(calls), lambda: functions, weight_bytes, untimeable_in(functions))


def _timed(scheduled: _ScheduledPlan, step: Step, seconds: CallSeconds, estimates: PartEstimates, origin: int) -> Step:
    calls = scheduled.calls_of(step.name).calls
    piece_time, correction = seconds.of(calls), estimates.corrections.get(step.machines[0], 1.0)
    together = estimates.is_contended(scheduled.plan, origin, step.machines[0])
    contended = piece_time.contended_seconds * estimates.oversubscription.get(step.machines[0], 1.0)
    return replace(
        step,
        seconds=(piece_time.seconds * correction,),
        contended_seconds=((contended if together else piece_time.seconds) * correction,),
        estimated_shares=(float(piece_time.origin == "estimated"),),
        weight_bytes=float(shared_weight_bytes(calls)),
        activation_bytes=float(max((call.activation_bytes for call in calls), default=0)),
    )
