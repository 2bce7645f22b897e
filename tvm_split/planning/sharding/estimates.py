"""Times of a plan's parts: measured, or estimated from the pieces' times and the parts' shares of the work."""

import math
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

from tvm import relax, tirx

from relay_passes.costs import calls, size_bytes
from relay_passes.ir import (
    dependent_names,
    is_tensor_constant,
    main_function,
    operations_of,
    returned_fields,
    used_variables,
)
from rpc_runtime.program.routes import CLIENT
from schedules.tuning.database import TuningDatabase
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.partition import Partition
from tvm_split.compiler.sharding import computed_shares, partition
from tvm_split.compiler.tuning_folder import open_database
from tvm_split.model import Model
from tvm_split.placement.estimate import CORE
from tvm_split.placement.plan import Plan
from tvm_split.placement.profile import ClusterProfile, PieceTime
from tvm_split.placement.step_graph import Step, StepGraph, Transfer
from tvm_split.planning.sharding.attempts import Attempts
from tvm_split.profiling.kernel_timing import time_kernels
from tvm_split.profiling.kernels import (
    KernelCall,
    Scheduled,
    TargetCode,
    kept_calls,
    scheduled_calls,
    shared_weight_bytes,
)
from tvm_split.profiling.machine_facts import MachineFacts
from tvm_split.profiling.machine_times import CallSeconds
from tvm_split.progress import StepProgress
from tvm_split.values import content_of


@dataclass(frozen=True)
class OperationCost:
    """The cost of one operation of a placed model: the position of its stage, its layer, its seconds and bytes."""

    stage: int
    layer: str
    seconds: float
    contended_seconds: float
    weight_bytes: float
    activation_bytes: float


@dataclass(frozen=True)
class _Rate:
    """A machine's seconds per second of a layer's roofline estimate, and per byte of the layer's weights.

    ``contention`` is the factor by which both increase under contention.
    """

    seconds: float
    weight_byte_seconds: float
    contention: float

    def of(self, roofline: float, weights: float, *, is_contended: bool) -> float:
        return (self.seconds * roofline + self.weight_byte_seconds * weights) * (
            self.contention if is_contended else 1.0
        )


class PartEstimates:
    """Estimates of the parts of one model by one profile.

    The estimate of an operation has two terms, both taken from the time of its layer's piece. One is the time to read
    the part's weights, which does not shrink with the number of rows. The other is its share of the piece's remaining
    time, by the roofline of `estimate`. So rows that two machines compute count twice, and slices and concatenations
    count by their bytes. ``corrections`` has, by machine, the ratio of measured to profiled time; estimates include it.
    """

    def __init__(self, model: Model, profile: ClusterProfile) -> None:
        self.corrections = dict(profile.corrections.compute_ratios)
        self._model = model
        self._hosts = {machine.machine: machine.hostname for machine in profile.machines}
        piece_of = {layer: piece for piece in profile.pieces for layer in piece.layers}
        dependent = dependent_names(main_function(model.module))
        self._constants = _constant_bytes(model)
        # Operations on constants alone are computed once, when a stage is compiled.
        self._calls = {
            name: (operations, moved) for name, operations, moved in calls(model.module) if name in dependent
        }
        work: defaultdict[str, float] = defaultdict(float)
        held: defaultdict[str, float] = defaultdict(float)
        for name, (operations, moved) in self._calls.items():
            piece = piece_of.get(model.layers.get(name, ""))
            if piece is not None:
                work[piece.name] += CORE.seconds(operations, moved)
                held[piece.name] += self._constants.get(name, 0)
        self.oversubscription = {
            machine.machine: profile.oversubscription(machine.machine) for machine in profile.machines
        }
        """By machine, the factor by which oversubscribed cores slow down the machines of its host."""
        self._prepacked = {
            layer: piece.weight_bytes / held[piece.name] if held[piece.name] else 0.0
            for layer, piece in piece_of.items()
        }
        times = [(machine, layer, piece.name) for machine in profile.machines for layer, piece in piece_of.items()]
        self._rates = {
            (machine.machine, layer): _rate(
                machine.pieces[piece],
                work[piece],
                held[piece],
                piece_of[layer].weight_bytes / machine.bytes_per_second,
                self.oversubscription[machine.machine],
            )
            for machine, layer, piece in times
        }

    def steps_of(self, plan: Plan) -> StepGraph:
        """The steps of a plan, all estimated.

        Raises:
            PlanError: as of `partition`: the plan does not fit the model, or a stage cannot be sharded that way.
        """
        placed = partition(self._model, plan)
        return StepGraph(self.steps(placed, plan), transfers_of(placed))

    def steps(self, placed: Partition, plan: Plan) -> tuple[Step, ...]:
        """The estimated steps of a plan whose model is already placed."""
        costs: list[list[OperationCost]] = [[] for _ in placed.plan.stages]
        for cost in self.costs(placed, plan):
            costs[cost.stage].append(cost)
        return tuple(
            Step(
                name=stage.name,
                stage=plan.stages[origin].name,
                machines=(stage.machine,),
                shares=(1.0,),
                seconds=(sum(cost.seconds for cost in stage_costs),),
                contended_seconds=(sum(cost.contended_seconds for cost in stage_costs),),
                estimated_shares=(1.0,),
                weight_bytes=sum(cost.weight_bytes for cost in stage_costs),
                activation_bytes=max((cost.activation_bytes for cost in stage_costs), default=0.0),
            )
            for stage, origin, stage_costs in zip(placed.plan.stages, placed.origins, costs, strict=True)
        )

    def costs(self, placed: Partition, plan: Plan) -> Iterator[OperationCost]:
        """The cost of each operation of a placed model on its machine, in the order of execution."""
        together = [
            self.is_contended(plan, origin, stage.machine)
            for stage, origin in zip(placed.plan.stages, placed.origins, strict=True)
        ]
        dependent = dependent_names(main_function(placed.model.module))
        constants = _constant_bytes(placed.model)
        for name, operations, moved in calls(placed.model.module):
            if name not in dependent or name not in placed.stage_of:
                continue
            number, layer = placed.stage_of[name], placed.model.layers[name]
            rate = self._rates.get((placed.plan.stages[number].machine, layer))
            if rate is not None:
                roofline, weights = CORE.seconds(operations, moved), constants.get(name, 0)
                yield OperationCost(
                    number,
                    layer,
                    rate.of(roofline, weights, is_contended=False),
                    rate.of(roofline, weights, is_contended=together[number]),
                    weights * self._prepacked[layer],
                    moved - weights,
                )

    def looked_ahead(self, plan: Plan, stage: int) -> Mapping[tuple[str, str], float]:
        """Seconds of computing of a sharded stage, by layer and machine, estimated without rewriting the model.

        Slices, exchanges and concatenations are not included. Errors are those of `steps_of`.
        """
        shared = plan.stages[stage]
        contended = {machine: self.is_contended(plan, stage, machine) for machine in shared.machines}
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (name, machine), share in computed_shares(self._model, shared).items():
            layer = self._model.layers[name]
            rate = self._rates.get((machine, layer))
            if rate is not None and name in self._calls:
                (operations, moved), weights = self._calls[name], self._constants[name]
                roofline = CORE.seconds(operations * share, (moved - weights) * share + weights)
                seconds[layer, machine] += rate.of(roofline, weights, is_contended=contended[machine])
        return seconds

    def is_contended(self, plan: Plan, stage: int, machine: str) -> bool:
        """Whether other machines of the same host compute a sharded stage together with this machine."""
        shared = plan.stages[stage]
        peers = [name for name in shared.machines if name != machine] if shared.sharding else []
        return any(self._hosts[peer] == self._hosts[machine] for peer in peers)


def transfers_of(placed: Partition) -> tuple[Transfer, ...]:
    """All transfers between the stages of a placed model, in the order in which their tensors are produced."""
    function = main_function(placed.model.module)
    stages, stage_of = placed.plan.stages, placed.stage_of
    sizes = {parameter.name: size_bytes(parameter.ty) for parameter in function.params}
    dependent = dependent_names(function)
    consumers: dict[str, dict[str, dict[str, None]]] = {}
    for binding in operations_of(function):
        sizes[binding.var.name] = size_bytes(binding.var.ty)
        if binding.var.name not in dependent:
            continue  # not transferred: each stage computes the tables that it needs
        stage = stages[stage_of[binding.var.name]]
        for used in used_variables(binding.value):
            if used.name in dependent and stage_of.get(used.name) != stage_of[binding.var.name]:
                consumers.setdefault(used.name, {}).setdefault(stage.machine, {})[stage.name] = None
    for field in returned_fields(function):
        if getattr(field, "name", None) in stage_of:
            consumers.setdefault(field.name, {})[CLIENT] = {}
    return tuple(
        Transfer(name, stages[stage_of[name]].name if name in stage_of else CLIENT, tuple(names), float(sizes[name]))
        for name in sizes
        for names in consumers.get(name, {}).values()
    )


def _rate(time: PieceTime, work: float, weights: float, reading_seconds: float, oversubscription: float) -> _Rate:
    """The rate of a piece from the ``work`` (roofline seconds) and ``weights`` (bytes) of its operations.

    ``reading_seconds`` is the time to read its weights. Machines that compute a stage together also wait for
    oversubscribed cores, which the piece's times do not include.
    """
    reading = min(reading_seconds, time.seconds) if weights else 0.0
    return _Rate(
        (time.seconds - reading) / work if work else 0.0,
        reading / weights if weights else 0.0,
        time.contended_seconds / time.seconds * oversubscription,
    )


def _constant_bytes(model: Model) -> Mapping[str, int]:
    """Bytes of the constants that each operation reads, directly or as results of operations on constants alone."""
    function = main_function(model.module)
    dependent = dependent_names(function)
    bytes_of: dict[str, int] = {}
    for binding in operations_of(function):
        read = binding.value.args if isinstance(binding.value, relax.Call) else ()
        direct_bytes = sum(size_bytes(argument.ty) for argument in read if is_tensor_constant(argument))
        derived = {used.name for used in used_variables(binding.value)} - dependent
        bytes_of[binding.var.name] = direct_bytes + sum(bytes_of[name] for name in derived)
    return bytes_of


def profile_parts(
    model: Model,
    plans: Sequence[Plan],
    cluster: Workers,
    estimates: PartEstimates,
    *,
    database: str | Path | None = None,
    refresh: bool = False,
    deadline: float = math.inf,
    on_progress: StepProgress | None = None,
    attempts: Attempts | None = None,
) -> tuple[StepGraph | None, ...]:
    """The measured steps of each plan: their kernels are compiled as for a deployment and cached like those of pieces.

    Kernels that cannot be measured are estimated, as in a profile. ``estimates`` says which steps run under contention.
    With ``attempts``, a plan whose parts cannot be built gives None instead of an error. Other arguments, and errors,
    are those of `time_kernels`.
    """
    attempted = [(plan, partial(_ScheduledPlan, model, plan, open_database(database))) for plan in plans]
    made = [attempts.built(plan.stages, make) if attempts else make() for plan, make in attempted]
    scheduled = [plan for plan in made if plan is not None]
    if not scheduled:
        return (None,) * len(plans)
    times = time_kernels(
        f"parts of {model.name}",
        lambda machine: _code(scheduled, machine),
        cluster,
        refresh=refresh,
        deadline=deadline,
        on_progress=on_progress,
    )
    used = {machine for plan in scheduled for machine in plan.machines}
    seconds = {time.machine.name: CallSeconds(time) for time in times if time.machine.name in used}
    return tuple(
        None
        if plan is None
        else StepGraph(
            tuple(
                _timed(plan, step, seconds[step.machines[0]], estimates, origin)
                for step, origin in zip(estimates.steps(plan.placed, plan.plan), plan.placed.origins, strict=True)
            ),
            transfers_of(plan.placed),
        )
        for plan in made
    )


class _ScheduledPlan:
    """A plan whose stages are partitioned, and their kernels scheduled for their machines, if they are not cached."""

    def __init__(self, model: Model, plan: Plan, database: TuningDatabase | None) -> None:
        self.plan = plan
        self.placed = partition(model, plan)
        self._database = database
        stages = self.placed.plan.stages
        self.machines = tuple(dict.fromkeys(stage.machine for stage in stages))
        targets = [plan.machine(machine).target for machine in self.machines]
        kept = kept_calls(
            targets, lambda: self._scheduled, database, model=model.digest, stages=content_of(plan)["stages"]
        )
        self.calls = {stage.name: calls for stage, (calls, _) in zip(stages, kept, strict=True)}
        """The kernel calls of each stage, by its name."""
        self.untimeable = frozenset[str]().union(*(untimeable for _, untimeable in kept))

    @cached_property
    def _scheduled(self) -> list[Scheduled]:
        layers = self.placed.model.layers
        return [
            scheduled_calls(part.function, self.plan.machine(stage.machine).target, part.layers(layers), self._database)
            for stage, part in self.placed.parts
        ]

    @property
    def functions(self) -> dict[str, tirx.PrimFunc]:
        """All distinct kernels, by digest."""
        return {digest: function for _, functions in self._scheduled for digest, function in functions.items()}

    def calls_on(self, machine: str) -> list[tuple[KernelCall, ...]]:
        """Return the kernel calls of each stage of a machine."""
        return [self.calls[stage.name] for stage in self.placed.plan.stages if stage.machine == machine]


def _code(plans: Sequence[_ScheduledPlan], facts: MachineFacts) -> TargetCode:
    """The kernels of all parts on machines of one target; each machine of that target measures all of them."""
    on_machines = [
        plan.calls_on(machine)
        for plan in plans
        for machine in plan.machines
        if plan.plan.machine(machine).target == facts.target
    ]
    calls = tuple(chain.from_iterable(chain.from_iterable(on_machines)))
    weight_bytes = max((sum(map(shared_weight_bytes, parts)) for parts in on_machines), default=0)
    untimeable = frozenset[str]().union(*(plan.untimeable for plan in plans))
    return TargetCode(
        facts.target, calls, lambda: dict(ChainMap(*(plan.functions for plan in plans))), weight_bytes, untimeable
    )


def _timed(scheduled: _ScheduledPlan, step: Step, seconds: CallSeconds, estimates: PartEstimates, origin: int) -> Step:
    calls = scheduled.calls[step.name]
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
