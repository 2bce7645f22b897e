"""Find candidate plans with sharded stages, estimate them, and measure the best few.

The rewrites decide how a run of blocks can be sharded. These options are estimated from the pieces' times and combined
by dynamic programming (`planner.shard_search`). The results are evaluated, their shares are balanced, and the best few
are measured in their own shapes, unless the cluster is only estimated.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from relay_passes.costs import tensors_in
from relay_passes.ir import main_function, operations_of, operator_name, shape_of
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.partition import Partition
from tvm_split.compiler.sharding import partition
from tvm_split.model import Model
from tvm_split.planner.by_hand import named, with_independent_layers
from tvm_split.planner.evaluate import evaluate, limit_violations, memory_shortage, shares_by_speed
from tvm_split.planner.plan import Plan, PlannedMachine
from tvm_split.planner.prediction import ComparedPlan
from tvm_split.planner.problem import Axis, Evaluation, Problem, Sharding, Stage, objective_seconds
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.request import PlanRequest
from tvm_split.planner.search.instance import instance_of
from tvm_split.planner.shard_search import (
    STAGE_SECONDS,
    Segment,
    ShardOption,
    blocks_of,
    cheapest,
    lightened,
    rebalanced,
    rounded,
)
from tvm_split.planner.step_graph import StepGraph
from tvm_split.progress import StepProgress
from tvm_split.shard_planning.attempts import Attempts
from tvm_split.shard_planning.estimates import PartEstimates, profile_parts, transfers_of
from tvm_split.units import names_of

MOST_BALANCED = 3
"""Most candidates whose shares are balanced."""
MOST_TRIES = 20
"""Most blocks with which no sharded stage can begin, for one sharding and one set of machines."""
SIZES = (2, 3, 4)
"""Sizes of the sets of machines that shard a stage, in addition to all machines; each set has the fastest ones."""
BALANCING = 3
"""Most iterations of balancing the shares of a plan."""
OPTIONS_SHARE = 0.6
"""Fraction of the time in which options are searched; the rest is for rewriting and balancing whole plans."""


@dataclass(frozen=True)
class ShardPlan:
    """Stages of layers, some of them sharded, and their evaluation."""

    stages: tuple[Stage, ...]
    graph: StepGraph
    evaluation: Evaluation

    @property
    def handover_seconds(self) -> float:
        """Seconds to hand over between the steps of the machine that has most, which an evaluation does not count."""
        steps = Counter(machine for step in self.graph.steps for machine in step.machines)
        return STAGE_SECONDS * (max(steps.values()) - 1)

    @property
    def words(self) -> str:
        """A description of the shardings and their machines."""
        shared = [stage for stage in self.stages if stage.sharding]
        how = dict.fromkeys(f"{stage.sharding.axis} ({stage.sharding.exchange})" for stage in shared if stage.sharding)
        machines = dict.fromkeys(machine for stage in shared for machine in stage.machines)
        return f"{names_of(list(how))} sharded over {names_of(list(machines))}"

    def compared(self, why: str) -> ComparedPlan:
        return ComparedPlan.of(self.words, self.stages, self.evaluation, why)


class ShardCandidates:
    """Searches for plans with sharded stages on the machines of a problem.

    ``make_plan`` makes a plan of stages with the machines' targets, which only measurements need.
    """

    def __init__(
        self,
        model: Model,
        profile: ClusterProfile,
        problem: Problem,
        request: PlanRequest,
        make_plan: Callable[[tuple[Stage, ...]], Plan],
    ) -> None:
        self._model, self._problem, self._request, self._make_plan = model, problem, request, make_plan
        self._links = problem.link_of
        self._seconds = {
            machine.machine: sum(time.seconds for time in machine.pieces.values()) for machine in profile.machines
        }
        self._estimates = PartEstimates(model, profile)
        forbidden = _forbidden(problem)
        self._forbidden = {layer: forbidden[piece.name] for piece in profile.pieces for layer in piece.layers}
        self._blocks = blocks_of(model.graph, profile, forbidden)
        self._block_of = {layer: number for number, block in enumerate(self._blocks) for layer in block.layers}
        self.attempts = Attempts()
        self._is_late: Callable[[], bool] = self.attempts.is_late

    def estimated(self, stages: tuple[Stage, ...]) -> ShardPlan:
        """The estimated plan of these stages; raises a `PlanError` if they cannot be sharded so or lack a link."""
        graph = self._estimates.steps_of(self._plan(stages))
        return ShardPlan(stages, graph, evaluate(self._problem, graph))

    def timed(
        self,
        plans: Sequence[ShardPlan],
        cluster: Workers,
        on_progress: StepProgress | None,
        attempts: Attempts | None = None,
    ) -> tuple[ShardPlan, ...]:
        """The same plans with their parts measured in their own shapes.

        Errors are those of `profile_parts`; with ``attempts``, plans whose parts cannot be built are left out.
        """
        graphs = profile_parts(
            self._model,
            [self._make_plan(plan.stages) for plan in plans],
            cluster,
            self._estimates,
            database=self._request.database,
            refresh=self._request.refresh,
            on_progress=on_progress,
            attempts=attempts,
        )
        return tuple(
            ShardPlan(plan.stages, graph, evaluate(self._problem, graph))
            for plan, graph in zip(plans, graphs, strict=True)
            if graph is not None
        )

    def candidates(self, deadline: float) -> tuple[ShardPlan, ...]:
        """Plans that satisfy the demands, in ascending order of their estimates; after the deadline, those so far."""
        self.attempts = Attempts(deadline)
        groups = self._options()
        # If memory is short, shard every block that can be sharded.
        return self._found_with(groups, all_shared=False) or self._found_with(groups, all_shared=True)

    def _found_with(self, groups: Sequence[Sequence[ShardOption]], *, all_shared: bool) -> tuple[ShardPlan, ...]:
        plans: dict[tuple[Stage, ...], ShardPlan] = {}
        inputs, outputs = (
            float(sum(tensor.size_bytes for tensor in tensors)) for tensors in (self._model.inputs, self._model.outputs)
        )
        for options in [[option for group in groups for option in group], *groups]:
            if plans and self.attempts.is_late():
                break
            segments = cheapest(self._blocks, options, self._links, inputs, outputs, all_shared=all_shared)
            stages = self._stages(segments)
            if not stages or stages in plans:
                continue
            # Runs of blocks that can be sharded one by one may not be possible together.
            plan = self.attempts.built(stages, partial(self.estimated, stages))
            if plan is not None:
                plans[stages] = plan
        best = sorted(plans.values(), key=self._rank)
        balanced = [*map(self._balanced, best[:MOST_BALANCED]), *best[MOST_BALANCED:]]
        return tuple(sorted(filter(self.keeps_demands, balanced), key=self.value))

    def value(self, plan: ShardPlan) -> float:
        """The seconds by which plans are compared, hand-overs included."""
        return objective_seconds(self._problem.objective, plan.evaluation) + plan.handover_seconds

    def keeps_demands(self, plan: ShardPlan) -> bool:
        """Whether a plan fits the memory and satisfies pins, numbers of stages and machines, and limits."""
        problem, evaluation = self._problem, plan.evaluation
        pairs = {(layer, machine) for stage in plan.stages for layer in stage.layers for machine in stage.machines}
        return (
            memory_shortage(problem, evaluation) == 0
            and not any(limit_violations(problem, plan.stages, evaluation))
            and not any(machine in self._forbidden.get(layer, ()) for layer, machine in pairs)
        )

    def _options(self) -> list[list[ShardOption]]:
        """Groups of options, one for each sharding and set of machines; when their time is over, those found so far."""
        groups: list[list[ShardOption]] = []
        pairs = [*product(self._teams(), _shardings(self._model))]
        for place, (machines, sharding) in enumerate(pairs, 1):
            shares = rounded(shares_by_speed([self._seconds[machine] for machine in machines]))
            # Each gets its part of the time, and what earlier ones left of theirs.
            self._is_late = partial(self.attempts.is_late, OPTIONS_SHARE * place / len(pairs))
            options = list(self._options_of(sharding, machines, shares))
            if options:
                groups.append(options)
        return groups

    def _teams(self) -> Iterator[tuple[str, ...]]:
        """Sets of the fastest machines, each in the order of the problem."""
        order = [machine.name for machine in self._problem.machines]
        able = [name for name in order if any(name in block.seconds for block in self._blocks)]
        fastest = sorted(able, key=self._seconds.__getitem__)
        most = min(len(able), self._problem.maximum_machines or len(able))
        for size in sorted({*SIZES, most}):
            if 2 <= size <= most:
                yield tuple(sorted(fastest[:size], key=order.index))

    def _options_of(
        self, sharding: Sharding, machines: tuple[str, ...], shares: tuple[float, ...]
    ) -> Iterator[ShardOption]:
        tries = MOST_TRIES
        first, last = 0, len(self._blocks)
        while first < last and tries and not self._is_late():
            option = ShardOption(sharding, machines, shares, first, {})
            end = self._last_end(option)
            seconds = self._by_end(option, end) if end > first else {}
            if seconds:
                yield replace(option, seconds=seconds)
            tries -= not seconds
            first = max(first + 1, end)

    def _last_end(self, option: ShardOption) -> int:
        """The last end of a stage that begins with an option; its beginning if no block can be sharded so."""
        # A block that cannot be sharded ends all longer stages too, so it is found by halving.
        last = len(self._blocks)
        if self._looked_ahead(option, last) is not None:
            return last
        ends = range(option.begin + 1, last)
        return option.begin + bisect_left(ends, True, key=lambda end: self._looked_ahead(option, end) is None)

    def _by_end(self, option: ShardOption, last: int) -> dict[int, Sequence[float]]:
        """The seconds of each block by the end of the stage; they depend on it only for halos that are computed twice.

        The model is rewritten for the last end only. The times for earlier ends of fused tiles are estimated without
        rewriting.
        """
        whole = self._costs(option, last)
        if whole is None:
            return {}
        seconds_by_end: dict[int, Sequence[float]] = {last: whole}
        fused = option.sharding.axis in ("rows", "columns") and option.sharding.exchange == "fused"
        for end in range(option.begin + 1, last):
            if fused and self._is_late():
                break
            seconds = self._looked_ahead(option, end) if fused else whole[: end - option.begin]
            if seconds is not None:
                seconds_by_end[end] = seconds
        return seconds_by_end

    def _plan_around(self, option: ShardOption, end: int) -> tuple[Plan, int]:
        """A plan that shards an option's blocks up to ``end``, and the position of the sharded stage."""
        ends = ((0, option.begin), (end, len(self._blocks)))
        holder = option.layout.holder
        around = [Segment(*span, holder) for span in ends if span[0] < span[1]]
        segments = sorted([*around, Segment(option.begin, end, holder, option)], key=lambda segment: segment.first)
        return self._plan(self._stages(segments)), int(option.begin > 0)

    def _looked_ahead(self, option: ShardOption, end: int) -> list[float] | None:
        """The seconds of each block without exchanges, estimated without rewriting; None if they cannot be sharded."""
        if not all(block.seconds.keys() >= {*option.machines} for block in self._blocks[option.begin : end]):
            return None
        plan, shared = self._plan_around(option, end)
        looked_ahead = partial(self._estimates.looked_ahead, plan, shared)
        layer_seconds = self.attempts.built(plan.stages, looked_ahead, may_refuse=True)
        return None if layer_seconds is None else self._block_seconds(option, end, layer_seconds.items())

    def _block_seconds(
        self, option: ShardOption, end: int, layer_seconds: Iterable[tuple[tuple[str, str], float]]
    ) -> list[float]:
        """The seconds of each block on the slowest machine, from those of layers on machines."""
        seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
        for (layer, machine), duration in layer_seconds:
            if layer in self._block_of:
                seconds[self._block_of[layer], machine] += duration
        return [max(seconds[block, machine] for machine in option.machines) for block in range(option.begin, end)]

    def _costs(self, option: ShardOption, end: int) -> list[float] | None:
        """The seconds of each block of the rewritten model, exchanges included; None if it cannot be rewritten."""
        plan, shared = self._plan_around(option, end)
        placed = self.attempts.built(plan.stages, partial(partition, self._model, plan), may_refuse=True)
        if placed is None:
            return None
        computing = self._block_seconds(
            option,
            end,
            (
                ((cost.layer, placed.plan.stages[cost.stage].machine), cost.contended_seconds)
                for cost in self._estimates.costs(placed, plan)
                if placed.origins[cost.stage] == shared
            ),
        )
        exchanging = self._exchanging(placed, shared)
        return [seconds + exchanging[block] for block, seconds in enumerate(computing, option.begin)]

    def _exchanging(self, placed: Partition, shared: int) -> Mapping[int, float]:
        """Seconds of the exchanges between machines of a sharded stage, by block; links work in parallel."""
        machine_of = {
            stage.name: stage.machine
            for stage, origin in zip(placed.plan.stages, placed.origins, strict=True)
            if origin == shared
        }
        sizes: defaultdict[tuple[int, str], defaultdict[tuple[str, str], float]]
        sizes = defaultdict(lambda: defaultdict(float))
        for transfer in transfers_of(placed):
            taker = transfer.targets[0] if transfer.targets else ""
            if (
                transfer.source in machine_of
                and taker in machine_of
                and machine_of[transfer.source] != machine_of[taker]
            ):
                level = transfer.source.rpartition("_")[2]
                block = self._block_of.get(placed.model.layers[transfer.tensor], 0)
                sizes[block, level][machine_of[transfer.source], machine_of[taker]] += transfer.bytes
        seconds_of_block: defaultdict[int, float] = defaultdict(float)
        for (block, _), crossing in sizes.items():
            crossing_seconds = (self._link_seconds(*ends, size) for ends, size in crossing.items())
            seconds_of_block[block] += STAGE_SECONDS + max(crossing_seconds)
        return seconds_of_block

    def _link_seconds(self, source: str, end: str, size: float) -> float:
        link = self._links.get((source, end))
        return float("inf") if link is None else link.latency_seconds + size / link.bytes_per_second

    def _stages(self, segments: Sequence[Segment]) -> tuple[Stage, ...]:
        if not segments:
            return ()
        groups = [
            [layer for block in self._blocks[segment.first : segment.end] for layer in block.layers]
            for segment in segments
        ]
        whole = with_independent_layers(self._model.graph, groups)
        return named(
            Stage((segment.machine,), tuple(layers))
            if segment.option is None
            else Stage(segment.option.machines, tuple(layers), segment.option.shares, sharding=segment.option.sharding)
            for segment, layers in zip(segments, whole, strict=True)
        )

    def _plan(self, stages: tuple[Stage, ...]) -> Plan:
        """A plan for rewriting the model, whose machines have a placeholder as target."""
        machines = tuple(PlannedMachine(machine.name, {"kind": "llvm"}, 1) for machine in self._problem.machines)
        return Plan(self._model.name, self._problem.objective, "", machines, stages)

    def _balanced(self, plan: ShardPlan) -> ShardPlan:
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

    def _rank(self, plan: ShardPlan) -> tuple[float, float]:
        return memory_shortage(self._problem, plan.evaluation), self.value(plan)


def _forbidden(problem: Problem) -> dict[str, frozenset[str]]:
    """By the name of a piece, the machines that may not have it."""
    instance = instance_of(problem)
    return {
        piece: frozenset(
            name for name, duration in zip(instance.machines, seconds, strict=True) if math.isinf(duration)
        )
        for piece, seconds in zip(instance.pieces, instance.seconds, strict=True)
    }


def _shardings(model: Model) -> tuple[Sharding, ...]:
    """The shardings that a model's operators suggest, the most promising first: there may be no time for all."""
    operations = operations_of(main_function(model.module))
    operators = {operator_name(operation.value) for operation in operations}
    images = [
        shape
        for operation in operations
        if operator_name(operation.value) in ("relax.nn.conv2d", "relax.nn.max_pool2d", "relax.nn.avg_pool2d")
        for tensor in tensors_in(operation.value.args[0].ty)
        if len(shape := shape_of(tensor)) == 4
    ]
    shardings: list[Sharding] = []
    if images:
        axis: Axis = "rows" if images[0][2] >= images[0][3] else "columns"
        shardings += [Sharding(axis, "fused"), Sharding(axis, "each")]
    if any(str(name).startswith(("relax.nn.softmax", "relax.nn.attention")) for name in operators):
        shardings.append(Sharding("heads", "fused"))
    if any(str(name).startswith(("relax.nn.conv", "relax.matmul")) for name in operators):
        shardings += [Sharding("channels", "fused"), Sharding("channels", "each")]
    if model.inputs and model.inputs[0].shape[:1] > (1,):
        shardings.append(Sharding("batch", "fused"))
    return tuple(shardings)
