"""The planner of one model on one session of workers: profile, problem, the best solution, and a solution's plan."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from rpc_runtime.client.worker_client import WorkerDescription
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.machine_targets import resolve_targets
from tvm_split.compiler.targets import cannot_execute
from tvm_split.errors import NoPlanError
from tvm_split.model import Model
from tvm_split.placement.estimate import estimated_profile
from tvm_split.placement.evaluate import keeps_demands
from tvm_split.placement.fallback import Fallback, fallback
from tvm_split.placement.graph import piece_edges
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.placement.problem import Problem, Stage
from tvm_split.placement.profile import ClusterProfile
from tvm_split.placement.request import PlanRequest
from tvm_split.placement.search.bounds import division_bound
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.placement.step_graph import Step
from tvm_split.placement.strategy import solve_by
from tvm_split.planning.choose import RELAXATION, beside, cannot_gain, choose, with_fewest_machines
from tvm_split.planning.problem_from_profile import (
    in_layers,
    model_problem,
    stages_of_pieces,
    with_identical_averaged,
)
from tvm_split.planning.sharding.search import ShardSearch
from tvm_split.profiling.cluster_profile import profile_model
from tvm_split.progress import StepProgress

MEASURING_SHARE = 0.6
"""Fraction of the time limit in which kernels are timed; links take the rest."""
SEARCHING_SHARE = 1 / 3
"""Fraction of the time limit for searching, even if measuring took all of it."""
WHOLE_LAYERS_SHARE = 0.4
"""Fraction of it for plans of whole layers, if plans with sharded layers are searched in all that is left."""


class Planner:
    """Plans a model by a request. Nothing is measured before `profile`, or a member that uses it, is accessed.

    ``described`` are the descriptions of the workers that have answered, by machine. ``measures`` says whether the
    profile is measured, neither given nor estimated.
    """

    def __init__(
        self,
        model: Model,
        workers: Workers,
        request: PlanRequest,
        described: Mapping[str, WorkerDescription] | None = None,
        on_progress: StepProgress | None = None,
    ) -> None:
        self.model, self.workers, self.request = model, workers, request
        self.described, self.on_progress = described or {}, on_progress
        self._started = time.monotonic()
        self.measures = request.profile is None and not (request.estimate or workers.launcher.in_process)

    @cached_property
    def profile(self) -> ClusterProfile:
        """The request's profile, or a measured or estimated one; raises as `tvm_split.planning.plan.plan`."""
        profile, request = self.request.profile, self.request
        if self.measures:
            deadline = self._started + MEASURING_SHARE * request.time_limit_seconds
            profile = self._profiled(refresh=request.refresh, deadline=deadline)
        return with_identical_averaged(profile or estimated_profile(self.model.description, self.workers))

    @property
    def known_profile(self) -> ClusterProfile:
        """The profile from kernels that were timed before; the others are estimated. Errors as of `profile_model`."""
        return with_identical_averaged(self._profiled(measures=False))

    def _profiled(self, **how: Any) -> ClusterProfile:
        request, on_progress = self.request, self.on_progress
        return profile_model(self.model, self.workers, database=request.database, on_progress=on_progress, **how)[0]

    @property
    def origin(self) -> str:
        """Where the seconds in the profile are from: ``"measured"``, or ``"estimated"`` if none was measured."""
        times = [time for machine in self.profile.machines for time in machine.pieces.values()]
        return "estimated" if all(time.origin == "estimated" for time in times) else "measured"

    @cached_property
    def problem(self) -> Problem:
        """The planning problem of the profile and the request's demands."""
        limits = {machine.name: machine.memory_bytes for machine in self.workers.machines}
        edges = piece_edges(self.model.graph, [piece.layers for piece in self.profile.pieces])
        return model_problem(self.profile, edges, limits, self.request)

    def with_profile(self, profile: ClusterProfile) -> Planner:
        """Return a planner with another profile of the same machines."""
        planner = Planner(self.model, self.workers, self.request, self.described, self.on_progress)
        planner.profile = profile
        return planner

    @cached_property
    def sharding(self) -> ShardSearch:
        workers = self.workers if self.measures else None
        return ShardSearch(
            self.model, self.profile, self.problem, self.request, self.plan_of, workers, self.on_progress
        )

    def best(self) -> Solution:
        """Return the best plan of whole layers; for latency, or if none fits, possibly one with sharded layers.

        Raises:
            NoPlanError: no plan fits.
        """
        request = self.request
        problem, limit = self.problem, request.time_limit_seconds  # measures
        deadline = max(self._started + limit, time.monotonic() + SEARCHING_SHARE * limit)
        whole, refusal = None, None
        may_shard = request.auto_shards and request.stages is None and len(self.workers.machines) > 1
        may_shard = may_shard and request.precision == "float32"
        try:
            share = WHOLE_LAYERS_SHARE if may_shard and request.objective == "latency" else 1.0
            whole = self.best_of_whole_layers(share)
        except NoPlanError as error:
            if not may_shard:
                raise
            refusal = error
        if whole is not None and not (may_shard and request.objective == "latency"):
            return whole
        relaxed_seconds, sharding = division_bound(problem), self.sharding
        sharded: Sequence[Solution] = ()
        if whole is None or not cannot_gain(whole, relaxed_seconds):
            sharded = sharding.best_few(deadline, math.inf if whole is None else whole.value_seconds)
        if refusal is not None and not sharded:
            raise refusal
        return choose(whole, sharded, relaxed_seconds, sharding.how, sharding.attempts.notes)

    def best_of_whole_layers(self, share: float = 1.0) -> Solution:
        """Return the best plan of whole layers, without machines that gain too little; raises as `solve_by`.

        The request's strategy has a share of the time for searching.
        """
        seconds = share * SEARCHING_SHARE * self.request.time_limit_seconds
        solution = solve_by(self.request.strategy, self.problem, seconds)
        return in_layers(self.model.graph, self.profile, self.problem, with_fewest_machines(self.problem, solution))

    def by_hand(self, stages: tuple[Stage, ...]) -> Solution:
        """Return the solution of a plan by hand, with the lower bound of the best plan of whole layers, if any."""
        try:
            best = self.best_of_whole_layers()
        except NoPlanError:  # no plan of whole layers fits the machines, so none gives a bound
            best = None
        return self.of_stages(stages, best, "plan by hand")

    def keeps_demands(self, solution: Solution) -> bool:
        """Whether a solution of layers keeps to pins, counts and limits; sharded layers must fit the memory too."""
        pieces = stages_of_pieces(self.profile, solution.stages)
        return (
            self.sharding.keeps_demands(solution) if pieces is None else keeps_demands(self.problem, pieces, solution)
        )

    def of_stages(self, stages: tuple[Stage, ...], best: Solution | None, what: str) -> Solution:
        """Return the solution of fixed stages of layers, with a lower bound.

        Args:
            best: the best plan of whole layers, whose lower bound is used; None if there is none.
            what: what the stages are, such as "plan by hand"; the solution's ``method`` begins with it.
        """
        pieces = stages_of_pieces(self.profile, stages)
        if pieces is None or best is None:
            solution, bound = self.sharding.of_stages(stages), division_bound(self.problem)
            bound = min(bound, math.inf if best is None else best.lower_bound_seconds)
            return replace(solution.bounded(bound), method=f"{what}; lower bound: {RELAXATION}")
        solution = in_layers(self.model.graph, self.profile, self.problem, solution_of(self.problem, pieces))
        return replace(beside(solution, best, what), stages=stages)

    def fallbacks(self, solution: Solution, plan: Plan) -> tuple[Fallback, ...]:
        """Return who takes the stages of each machine of a solution, if only that is lost."""
        layers = {stage.name: set(stage.layers) for stage in solution.stages}
        pieces = tuple(zip(self.profile.pieces, self.problem.pieces, strict=True))
        kept_off = {(pin.piece, pin.machine) for pin in self.problem.pins if pin.forbidden}

        def slower(step: Step, own: str, other: str) -> float:
            moved = [piece for profiled, piece in pieces if not layers[step.stage].isdisjoint(profiled.layers)]
            target, worker = plan.machine(own).target, self.described.get(other)
            fits = (target["kind"] == "cuda") == self.workers.machine(other).has_gpu
            fits = fits and not any((piece.name, other) in kept_off for piece in moved)
            if not fits or (worker and cannot_execute(target, worker.architecture, worker.cpu_features)):
                return math.inf
            before, after = (math.fsum(piece.seconds[name] for piece in moved) for name in (own, other))
            return after / before if before > 0 else 1.0

        return tuple(fallback(self.problem, solution.graph, lost, slower) for lost in solution.machines)

    def plan_of(self, stages: tuple[Stage, ...], origin: str = "") -> Plan:
        """Return the plan of these stages of layers, with the targets of their machines."""
        targets = resolve_targets(self.workers, {name for stage in stages for name in stage.machines}, self.described)
        machines = tuple(
            PlannedMachine(machine.name, targets[machine.name], machine.threads, machine.address)
            for machine in self.workers.machines
            if machine.name in targets
        )
        return Plan(self.model.name, self.request.objective, origin, machines, stages)
