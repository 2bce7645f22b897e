"""Find sharded plans, estimate them, balance their shares, and measure the best few.

Options (`ShardOptions`) are combined by dynamic programming (`placement.shard_search`). The results are evaluated and
balanced, and the best few are measured in their own shapes, unless the cluster is only estimated.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain

from tvm_split.cluster.cluster import Workers
from tvm_split.model import Model
from tvm_split.placement.by_hand import completed
from tvm_split.placement.evaluate import limit_violations, memory_shortage
from tvm_split.placement.plan import Plan
from tvm_split.placement.problem import Problem, Stage
from tvm_split.placement.profile import ClusterProfile
from tvm_split.placement.request import PlanRequest
from tvm_split.placement.shard_search import ShardOption, cheapest, lightened, rebalanced
from tvm_split.placement.solution import Solution, solution_of
from tvm_split.planning.sharding.attempts import Attempts
from tvm_split.planning.sharding.estimates import PartEstimates, profile_parts
from tvm_split.planning.sharding.options import ShardOptions, forbidden_machines, plan_to_rewrite
from tvm_split.progress import StepProgress

MOST_BALANCED = 3
"""Most plans whose shares are balanced."""
BALANCING = 3
"""Most iterations of balancing the shares of a plan."""
MOST_TIMED = 3
"""Most plans that are measured."""
TIMING_SHARE = 0.6
"""Share of the search's time in which plans are measured."""
WORTH_TIMING = 1.25
"""Largest estimate, by the value to beat, of a plan that is measured: parts often take less than estimated."""
STEP = "considering splits inside layers"


class ShardSearch:
    """Searches for plans with sharded stages. Parts are measured on ``workers``; if it is None, they are estimated.

    ``make_plan`` makes a plan of stages with the machines' targets, which only measurements need.
    """

    def __init__(
        self,
        model: Model,
        profile: ClusterProfile,
        problem: Problem,
        request: PlanRequest,
        make_plan: Callable[[tuple[Stage, ...]], Plan],
        workers: Workers | None = None,
        on_progress: StepProgress | None = None,
    ) -> None:
        self._model, self._profile, self._problem, self._request = model, profile, problem, request
        self._make_plan, self._workers = make_plan, workers
        self._on_progress = on_progress or (lambda what, done, steps: None)
        self.attempts = Attempts()
        """What the latest search could not build, and whether its time was over."""

    @property
    def how(self) -> str:
        """How the plans were found, for users."""
        how = "estimated" if self._workers is None else "timed in their own shapes"
        return f"sharded plans searched, the best few {how}"

    @cached_property
    def _estimates(self) -> PartEstimates:
        return PartEstimates(self._model, self._profile)

    @cached_property
    def _forbidden(self) -> dict[str, frozenset[str]]:
        """The machines that may not compute a layer, by layer."""
        forbidden = forbidden_machines(self._problem)
        return {layer: forbidden[piece.name] for piece in self._profile.pieces for layer in piece.layers}

    def of_stages(self, stages: tuple[Stage, ...]) -> Solution:
        """Return the solution of stages by hand, measured if possible; raises as `estimated`."""
        (solution,) = self._measured([self.estimated(stages)])
        return solution

    def estimated(self, stages: tuple[Stage, ...]) -> Solution:
        """Return the estimated solution of these stages.

        Raises:
            PlanError: the stages cannot be sharded so, or a link is missing.
        """
        graph = self._estimates.steps_of(plan_to_rewrite(self._model, self._problem, stages))
        return solution_of(self._problem, stages, graph=graph)

    def best_few(self, deadline: float, value_to_beat: float) -> Sequence[Solution]:
        """Return the best plans that satisfy the demands, measured if possible; if none is worth it, the best estimate.

        A plan is worth measuring if its estimate is at most `WORTH_TIMING` × ``value_to_beat`` (seconds). The search
        ends at the ``deadline``, in seconds of `time.monotonic`, and nothing is measured after it. If there is no other
        plan, ``value_to_beat`` is infinite, and one plan is measured even after it.
        """
        self._on_progress(STEP, 0, 1)
        needs_one = math.isinf(value_to_beat)
        found = self.candidates(_earlier(deadline, 1 - TIMING_SHARE))
        if needs_one and not found and self.attempts.was_late:
            found = self.candidates(math.inf)
        near = [plan for plan in found if plan.compared_seconds <= WORTH_TIMING * value_to_beat][:MOST_TIMED]
        timed: list[Solution] = []
        for number, plan in enumerate(near):
            if self._workers is None or time.monotonic() <= deadline or (needs_one and not timed):
                own_deadline = _earlier(deadline, 1 / (len(near) - number))
                timed += filter(self.keeps_demands, self._measured([plan], self.attempts, own_deadline))
        self._on_progress(STEP, 1, 1)
        return timed if near else found[:1]

    def _measured(
        self, solutions: Sequence[Solution], attempts: Attempts | None = None, deadline: float = math.inf
    ) -> Sequence[Solution]:
        """Return solutions with their parts measured in their own shapes; the same ones if nothing is measured.

        The kernels that are not measured before the ``deadline`` are estimated.

        Errors are those of `profile_parts`; with ``attempts``, plans whose parts cannot be built are left out.
        """
        if self._workers is None:
            return solutions
        graphs = profile_parts(
            self._model,
            [self._make_plan(solution.stages) for solution in solutions],
            self._workers,
            self._estimates,
            database=self._request.database,
            refresh=self._request.refresh,
            deadline=deadline,
            on_progress=self._on_progress,
            attempts=attempts,
        )
        return [
            solution_of(self._problem, solution.stages, graph=graph)
            for solution, graph in zip(solutions, graphs, strict=True)
            if graph is not None
        ]

    def candidates(self, deadline: float) -> tuple[Solution, ...]:
        """Return plans that satisfy the demands, the best estimates first; after the deadline, those so far."""
        self.attempts = Attempts(deadline)
        options = ShardOptions(self._model, self._profile, self._problem, self._estimates, self.attempts)
        groups = options.groups()
        # If memory is short, shard every block that can be sharded.
        return self._combined(options, groups, all_sharded=False) or self._combined(options, groups, all_sharded=True)

    def _combined(
        self, options: ShardOptions, groups: Sequence[Sequence[ShardOption]], *, all_sharded: bool
    ) -> tuple[Solution, ...]:
        plans: dict[tuple[Stage, ...], Solution] = {}
        inputs, outputs = (
            float(sum(tensor.size_bytes for tensor in tensors)) for tensors in (self._model.inputs, self._model.outputs)
        )
        for some in [list(chain.from_iterable(groups)), *groups]:
            if plans and self.attempts.is_late():
                break
            links = self._problem.link_of
            stages = cheapest(options.blocks, some, links, inputs, outputs, all_sharded=all_sharded)
            stages = completed(self._model.graph, stages) if stages else ()
            if not stages or stages in plans:
                continue
            # Runs of blocks that can be sharded one by one may not be possible together.
            plan = self.attempts.built(stages, partial(self.estimated, stages))
            if plan is not None:
                plans[stages] = plan
        best = sorted(plans.values(), key=self._rank)
        balanced = [*map(self._balanced, best[:MOST_BALANCED]), *best[MOST_BALANCED:]]
        return tuple(sorted(filter(self.keeps_demands, balanced), key=lambda plan: plan.compared_seconds))

    def keeps_demands(self, plan: Solution) -> bool:
        """Whether a plan fits the memory and satisfies pins, numbers of stages and machines, and limits."""
        problem, evaluation = self._problem, plan.evaluation
        pairs = {(layer, machine) for stage in plan.stages for layer in stage.layers for machine in stage.machines}
        return (
            memory_shortage(problem, evaluation) == 0
            and not any(limit_violations(problem, plan.stages, evaluation))
            and not any(machine in self._forbidden.get(layer, ()) for layer, machine in pairs)
        )

    def _balanced(self, plan: Solution) -> Solution:
        """The plan with shares by which the machines of each sharded stage finish at the same time, if that is better.

        If memory is short, the shares of machines that exceed theirs are reduced in proportion instead.
        """
        limits = {machine.name: machine.memory_bytes for machine in self._problem.machines}
        for _ in range(BALANCING):
            is_short = memory_shortage(self._problem, plan.evaluation) > 0
            stages = tuple(
                lightened(stage, plan.evaluation, limits) if is_short else rebalanced(stage, plan.graph)
                for stage in plan.stages
            )
            if stages == plan.stages or self.attempts.is_late():
                break
            # A share may be too small to shard with.
            balanced = self.attempts.built(stages, partial(self.estimated, stages), may_refuse=True)
            if balanced is None or self._rank(balanced) >= self._rank(plan):
                break
            plan = balanced
        return plan

    def _rank(self, plan: Solution) -> tuple[float, float]:
        return memory_shortage(self._problem, plan.evaluation), plan.compared_seconds


def _earlier(deadline: float, share: float) -> float:
    """Return the deadline of a share of the time that is left, in seconds of `time.monotonic`."""
    now = time.monotonic()
    return now + share * max(deadline - now, 0.0)
