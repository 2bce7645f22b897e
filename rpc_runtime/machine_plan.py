"""What one machine has to know of a program: its stages, and the tensors that come in, go out and stay."""

from __future__ import annotations

from dataclasses import dataclass

from rpc_runtime.program import CLIENT, Program, StageSpec, TensorSpec


@dataclass(frozen=True)
class PlannedRoute:
    """A route with its number on the wire and with how many micro-batches of it may be under way.

    ``source == destination`` is a tensor that one stage hands to another stage of the same machine.
    """

    tensor_index: int
    tensor: TensorSpec
    source: str
    destination: str
    queue_depth: int


@dataclass(frozen=True)
class MachinePlan:
    """The part of a program that touches ``machine`` (or the client)."""

    machine: str
    stages: tuple[StageSpec, ...]
    incoming: tuple[PlannedRoute, ...]
    outgoing: tuple[PlannedRoute, ...]
    local: tuple[PlannedRoute, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(route.source for route in self.incoming))

    @property
    def destinations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(route.destination for route in self.outgoing))

    @property
    def routes(self) -> tuple[PlannedRoute, ...]:
        return (*self.incoming, *self.outgoing, *self.local)

    def consumers(self, tensor: str) -> tuple[tuple[int, int], ...]:
        """Who takes a tensor here: (position of the stage in ``stages``, position among its inputs)."""
        return tuple(
            (position, place)
            for position, stage in enumerate(self.stages)
            for place, wanted in enumerate(stage.inputs)
            if wanted.name == tensor
        )


def queue_depth(producer_depth: int, consumer_depth: int) -> int:
    """Micro-batches of one tensor that may be under way between two stages: 2 d + 1, d the difference in depth.

    Between neighbours (d = 1) that is one received, one waiting, one consumed. Each stage that a skip connection
    jumps over holds one micro-batch in computing and one in transfer, so the skipping tensor needs two more places,
    or the pipeline would stall on it.
    """
    return 2 * (consumer_depth - producer_depth) + 1


def planned_routes(program: Program) -> tuple[PlannedRoute, ...]:
    """Every route of the program, those inside one machine included; a tensor's index is its place in ``producers``."""
    indexes = {name: index for index, name in enumerate(program.producers)}
    last = 1 + max(program.depths.values(), default=0)
    found: dict[tuple[str, str], PlannedRoute] = {}
    uses = [(tensor, stage.machine, program.depths[stage.name]) for stage in program.stages for tensor in stage.inputs]
    uses += [(tensor, CLIENT, last) for tensor in program.outputs]
    for tensor, destination, consumer_depth in uses:
        if tensor.name not in indexes:
            raise ValueError(f"tensor {tensor.name!r} is used on {destination!r}, and no stage or input makes it")
        producer = program.producers[tensor.name]
        source = CLIENT if producer is None else producer.machine
        if source == destination == CLIENT:
            continue  # a model input that is an output never leaves the client
        producer_depth = 0 if producer is None else program.depths[producer.name]
        depth = queue_depth(producer_depth, consumer_depth)
        before = found.get((tensor.name, destination))
        if before is not None:
            depth = max(depth, before.queue_depth)
        found[tensor.name, destination] = PlannedRoute(indexes[tensor.name], tensor, source, destination, depth)
    return tuple(found.values())


def machine_plan(program: Program, machine: str) -> MachinePlan:
    """The plan of ``machine``, which may be ``CLIENT``."""
    routes = planned_routes(program)
    return MachinePlan(
        machine=machine,
        stages=program.stages_on(machine),
        incoming=tuple(r for r in routes if r.destination == machine != r.source),
        outgoing=tuple(r for r in routes if r.source == machine != r.destination),
        local=tuple(r for r in routes if r.source == r.destination == machine),
    )
