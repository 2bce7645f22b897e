"""Options: which runs of blocks can be sharded, along which axis and over which machines, and what each block takes.

The rewrites of the model decide what is possible. Seconds are estimated from the pieces' times.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from relay_passes.costs import tensors_in
from relay_passes.ir import main_function, operations_of, operator_name, shape_of
from tvm_split.compiler.partition import Partition
from tvm_split.compiler.sharding import partition
from tvm_split.model import Model
from tvm_split.placement.by_hand import completed
from tvm_split.placement.evaluate import shares_by_speed
from tvm_split.placement.plan import Plan, PlannedMachine
from tvm_split.placement.problem import Axis, Problem, Sharding, Stage
from tvm_split.placement.profile import ClusterProfile
from tvm_split.placement.search.instance import instance_of
from tvm_split.placement.shard_search import ShardOption, blocks_of, rounded, stage_of, whole_on
from tvm_split.placement.solution import STAGE_SECONDS
from tvm_split.planning.sharding.attempts import Attempts
from tvm_split.planning.sharding.estimates import PartEstimates, transfers_of

MOST_TRIES = 20
"""Most blocks with which no sharded stage can begin, for one sharding and one set of machines."""
SIZES = (2, 3, 4)
"""Sizes of the sets of machines that shard a stage, in addition to all machines; each set has the fastest ones."""
OPTIONS_SHARE = 0.6
"""Fraction of the time in which options are searched; the rest is for rewriting and balancing whole plans."""


class ShardOptions:
    """The options of a model on the machines of a problem."""

    def __init__(
        self, model: Model, profile: ClusterProfile, problem: Problem, estimates: PartEstimates, attempts: Attempts
    ) -> None:
        self._model, self._problem, self._estimates, self.attempts = model, problem, estimates, attempts
        self._links = problem.link_of
        self._seconds = {
            machine.machine: sum(time.seconds for time in machine.pieces.values()) for machine in profile.machines
        }
        forbidden = forbidden_machines(problem)
        self.blocks = blocks_of(model.graph, profile, forbidden)
        self._block_of = {layer: number for number, block in enumerate(self.blocks) for layer in block.layers}
        self._is_late: Callable[[], bool] = attempts.is_late

    def groups(self) -> list[list[ShardOption]]:
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
        """Yield sets of the fastest machines, of each size in `SIZES` and of all, each in the problem's order."""
        order = [machine.name for machine in self._problem.machines]
        able = [name for name in order if any(name in block.seconds for block in self.blocks)]
        fastest = sorted(able, key=self._seconds.__getitem__)
        most = min(len(able), self._problem.maximum_machines or len(able))
        for size in sorted({*SIZES, most}):
            if 2 <= size <= most:
                yield tuple(sorted(fastest[:size], key=order.index))

    def _options_of(
        self, sharding: Sharding, machines: tuple[str, ...], shares: tuple[float, ...]
    ) -> Iterator[ShardOption]:
        tries = MOST_TRIES
        first, last = 0, len(self.blocks)
        while first < last and tries and not self._is_late():
            option = ShardOption(sharding, machines, shares, first, {})
            end = self._last_end(option)
            seconds = self._by_end(option, end) if end > first else {}
            if seconds:
                yield replace(option, seconds=seconds)
            tries -= not seconds
            first = max(first + 1, end)

    def _last_end(self, option: ShardOption) -> int:
        """Return the last end of a stage that begins with ``option``; its beginning if no block can be sharded so."""
        # A block that cannot be sharded ends all longer stages too, so it is found by halving.
        last = len(self.blocks)
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
        holder, stage = whole_on(option.layout.holder), partial(stage_of, self.blocks)
        sharded = stage(option.begin, end, option.layout, option.sharding)
        around = [stage(0, option.begin, holder), sharded, stage(end, len(self.blocks), holder)]
        stages = completed(self._model.graph, [one for one in around if one.layers])
        return plan_to_rewrite(self._model, self._problem, stages), int(option.begin > 0)

    def _looked_ahead(self, option: ShardOption, end: int) -> list[float] | None:
        """The seconds of each block without exchanges, estimated without rewriting; None if they cannot be sharded."""
        if not all(block.seconds.keys() >= {*option.machines} for block in self.blocks[option.begin : end]):
            return None
        plan, sharded = self._plan_around(option, end)
        looked_ahead = partial(self._estimates.looked_ahead, plan, sharded)
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
        plan, sharded = self._plan_around(option, end)
        placed = self.attempts.built(plan.stages, partial(partition, self._model, plan), may_refuse=True)
        if placed is None:
            return None
        computing = self._block_seconds(
            option,
            end,
            (
                ((cost.layer, placed.plan.stages[cost.stage].machine), cost.contended_seconds)
                for cost in self._estimates.costs(placed, plan)
                if placed.origins[cost.stage] == sharded
            ),
        )
        exchanging = self._exchanging(placed, sharded)
        return [seconds + exchanging[block] for block, seconds in enumerate(computing, option.begin)]

    def _exchanging(self, placed: Partition, sharded: int) -> Mapping[int, float]:
        """Seconds of the exchanges between machines of a sharded stage, by block; links work in parallel."""
        machine_of = {
            stage.name: stage.machine
            for stage, origin in zip(placed.plan.stages, placed.origins, strict=True)
            if origin == sharded
        }
        sizes: defaultdict[tuple[int, str], defaultdict[tuple[str, str], float]]
        sizes = defaultdict(lambda: defaultdict(float))
        for transfer in transfers_of(placed):
            consumer = transfer.targets[0] if transfer.targets else ""
            if (
                transfer.source in machine_of
                and consumer in machine_of
                and machine_of[transfer.source] != machine_of[consumer]
            ):
                level = transfer.source.rpartition("_")[2]
                block = self._block_of.get(placed.model.layers[transfer.tensor], 0)
                sizes[block, level][machine_of[transfer.source], machine_of[consumer]] += transfer.bytes
        seconds_of_block: defaultdict[int, float] = defaultdict(float)
        for (block, _), sent in sizes.items():
            links = [(self._links.get(ends), size) for ends, size in sent.items()]
            sending = (
                link.latency_seconds + size / link.bytes_per_second if link else math.inf for link, size in links
            )
            seconds_of_block[block] += STAGE_SECONDS + max(sending)
        return seconds_of_block


def plan_to_rewrite(model: Model, problem: Problem, stages: tuple[Stage, ...]) -> Plan:
    """A plan for rewriting the model, whose machines have a placeholder as target."""
    machines = tuple(PlannedMachine(machine.name, {"kind": "llvm"}, 1) for machine in problem.machines)
    return Plan(model.name, problem.objective, "", machines, stages)


def forbidden_machines(problem: Problem) -> dict[str, frozenset[str]]:
    """Return the machines that may not compute a piece, by the piece's name."""
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
