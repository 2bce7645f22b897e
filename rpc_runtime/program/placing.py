"""Places the stages of lost machines on those that are left; stages move whole, so nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.program.program import Program, RouteCodec
from rpc_runtime.program.round_robin import schedule_by_share
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.specs import StageSpec

Unfit = Callable[[str, Sequence[StageSpec]], str]
"""Returns why a machine cannot hold these stages together; an empty text if it can."""
StageSeconds = Callable[[StageSpec, str], float]
"""Returns how long a machine computes one micro-batch of a stage, in seconds."""

_Homes = Mapping[tuple[str, int], str]
"""The machine of each replica, by stage name and number of the replica."""


def place(
    program: Program, lost: Collection[str], machines: Sequence[str], unfit: Unfit, seconds: StageSeconds
) -> Program:
    """Return the program with the stages of ``lost`` machines on others of ``machines``; all other stages stay.

    A stage goes to the machine that then computes for the shortest time per micro-batch; if several do, to one that
    exchanges tensors with the stage. A replica goes to a machine without stages, or is left out while another replica
    is there. A codec stays with the tensor, so that results do not change, unless both ends are now on one machine.

    Raises:
        WorkerUnavailableError: a stage fits on no machine.
    """
    placement = _Placement(program, [machine for machine in machines if machine not in lost], unfit, seconds)
    for replicas in program.replicas.values():
        is_there = any(stage.machine not in lost for stage in replicas)
        for stage in replicas:
            if stage.machine in lost:
                is_there = placement.move(stage, only_idle=is_there) or is_there
    return _rebuilt(program, placement.homes)


def held(program: Program, machine: str, names: Collection[str], unfit: Unfit) -> Program | None:
    """Return a program of those stages with these names that a machine can hold beside its own; None if it has none.

    It has as many as fit, in topological order, and one replica of each.
    """
    own, stages = program.stages_on(machine), list[StageSpec]()
    for stage in program.stages:
        is_there = any(stage.name == other.name for other in (*own, *stages))
        if stage.name in names and not is_there and not unfit(machine, (*own, *stages, stage)):
            stages.append(replace(stage, machine=machine, replica=0, replica_schedule=(0,)))
    made = {tensor.name: tensor for stage in stages for tensor in stage.outputs}
    taken = {tensor.name: tensor for stage in stages for tensor in stage.inputs if tensor.name not in made}
    return Program(tuple(taken.values()), tuple(made.values()), tuple(stages)) if stages else None


class _Placement:
    """Where the stages are so far."""

    def __init__(self, program: Program, machines: Sequence[str], unfit: Unfit, seconds: StageSeconds) -> None:
        self._program = program
        self._held = {machine: list(program.stages_on(machine)) for machine in machines}
        self._unfit = unfit
        self._seconds = seconds
        self.homes = {
            (stage.name, stage.replica): machine for machine, stages in self._held.items() for stage in stages
        }

    def move(self, stage: StageSpec, *, only_idle: bool) -> bool:
        """Place a lost stage; return False if ``only_idle`` and no machine without stages can hold it."""
        reasons: dict[str, str] = {}
        for machine in sorted(self._held, key=lambda machine: self._cost(stage, machine)):
            held = self._held[machine]
            if only_idle and held:
                continue
            if any(other.name == stage.name for other in held):
                reasons[machine] = "it has another replica of this stage"
            elif reason := self._unfit(machine, (*held, stage)):
                reasons[machine] = reason
            else:
                held.append(stage)
                self.homes[stage.name, stage.replica] = machine
                return True
        if only_idle:
            return False
        why = "; ".join(f"{machine}: {reason}" for machine, reason in reasons.items())
        raise WorkerUnavailableError(
            f"stage {stage.name!r} was on machine {stage.machine!r}, and fits on no other machine"
            f"{f' ({why})' if why else ': none is left'}. Start {stage.machine!r} again, or add a machine"
        )

    def _cost(self, stage: StageSpec, machine: str) -> tuple[float, bool, str]:
        held = self._held[machine]
        seconds = sum(self._seconds(other, machine) * other.micro_batches.share for other in (*held, stage))
        return seconds, not any(_exchange(stage, other) for other in held), machine


def _exchange(one: StageSpec, other: StageSpec) -> bool:
    """Return whether one of the stages takes what the other makes."""
    return any(not {*a.outputs}.isdisjoint(b.inputs) for a, b in ((one, other), (other, one)))


def _rebuilt(program: Program, homes: _Homes) -> Program:
    """Return the program with each replica at home, those without a home left out."""
    for schedule in (schedule_by_share, _equal_schedule):
        stages = tuple(_at_home(program, homes, schedule))
        try:
            moved = replace(program, stages=stages, codecs=())
        except ValueError:  # the schedules of all stages repeat together too late
            continue
        return replace(moved, codecs=_codecs(program, moved, homes))
    raise WorkerUnavailableError("without the replicas that are lost, the schedules of the others repeat too late")


def _at_home(
    program: Program, homes: _Homes, schedule: Callable[[Sequence[int]], tuple[int, ...]]
) -> Iterator[StageSpec]:
    for name, replicas in program.replicas.items():
        left = [replace(stage, machine=homes[key]) for stage in replicas if (key := (name, stage.replica)) in homes]
        if len(left) < len(replicas):
            new = schedule([left[0].replica_schedule.count(stage.replica) for stage in left])
            left = [replace(stage, replica=number, replica_schedule=new) for number, stage in enumerate(left)]
        yield from left


def _equal_schedule(weights: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(len(weights)))


def _codecs(before: Program, after: Program, homes: _Homes) -> tuple[RouteCodec, ...]:
    """Return the codecs of the earlier routes for the routes that replace these."""
    routes = {(route.tensor.name, route.source, route.destination) for route in after.routes}
    own = {(codec.tensor, codec.source, codec.destination): codec for codec in before.codecs}
    codecs = {route: codec for route, codec in own.items() if route in routes}
    for codec in before.codecs:
        producers = [stage for stage in before.producers[codec.tensor] if stage.machine == codec.source]
        consumers = [
            stage
            for stage in before.stages_on(codec.destination)
            if any(tensor.name == codec.tensor for tensor in stage.inputs)
        ]
        for source in _ends(producers, homes):
            for destination in _ends(consumers, homes):
                if (route := (codec.tensor, source, destination)) in routes:
                    codecs.setdefault(route, replace(codec, source=source, destination=destination))
    return tuple(codecs.values())


def _ends(stages: Sequence[StageSpec], homes: _Homes) -> list[str]:
    """Return the machines of these stages; of no stages, the client."""
    if not stages:
        return [CLIENT]
    return [homes[stage.name, stage.replica] for stage in stages if (stage.name, stage.replica) in homes]
