"""What one machine has to know of a program: its stages, and the tensors that come in, go out and stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from rpc_runtime.program.codec import Codec
from rpc_runtime.program.program import CLIENT, Program, StageSpec, TensorSpec
from rpc_runtime.program.turns import EVERY, Recurrence, cycle_of


@dataclass(frozen=True)
class PlannedRoute:
    """A route with its number on the wire and with how many micro-batches of it may be under way.

    ``source == destination`` is a tensor that one stage hands to another stage of the same machine. Only the
    micro-batches of ``when`` go this way. In a stream the tensor is written as ``codec`` says.
    """

    tensor_index: int
    tensor: TensorSpec
    source: str
    destination: str
    queue_depth: int
    when: Recurrence = EVERY
    codec: Codec = Codec.NONE


@dataclass(frozen=True)
class MachinePlan:
    """The part of a program that touches ``machine`` (or the client)."""

    machine: str
    stages: tuple[StageSpec, ...]
    incoming: tuple[PlannedRoute, ...]
    outgoing: tuple[PlannedRoute, ...]
    local: tuple[PlannedRoute, ...]

    @property
    def by_source(self) -> dict[str, list[PlannedRoute]]:
        """The routes that come in, by the machine that they come from."""
        return _grouped(self.incoming, attrgetter("source"))

    @property
    def by_destination(self) -> dict[str, list[PlannedRoute]]:
        """The routes that go out, by the machine that they lead to."""
        return _grouped(self.outgoing, attrgetter("destination"))

    @property
    def routes(self) -> tuple[PlannedRoute, ...]:
        return (*self.incoming, *self.outgoing, *self.local)

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """(source, destination) of the links between this machine and other ones; the client is none."""
        ends = ((route.source, route.destination) for route in (*self.incoming, *self.outgoing))
        return tuple(dict.fromkeys(link for link in ends if CLIENT not in link))

    @cached_property
    def period(self) -> int:
        """After so many micro-batches everything here goes the same ways again; 1 without replicas.

        Raises:
            ValueError: that is after more than `LONGEST_CYCLE`.
        """
        turns = [stage.own_turns for stage in self.stages] + [route.when for route in self.routes]
        return cycle_of({each.period for each in turns})

    def destinations_of(self, tensor: str, sequence: int) -> tuple[str, ...]:
        """The other machines that a micro-batch of a tensor goes to from here."""
        return tuple(route.destination for route in self._leaving.get(tensor, ()) if sequence in route.when)

    def sends(self, tensors: Sequence[TensorSpec]) -> list[list[tuple[str, int, str]]]:
        """Which of these go where, by the place of a micro-batch in the period: name, place among them, machine."""
        found: list[list[tuple[str, int, str]]] = [[] for _ in range(self.period)]
        for place, tensor in enumerate(tensors):
            for route in self._leaving.get(tensor.name, ()):
                for turn in route.when.within(self.period):
                    found[turn].append((tensor.name, place, route.destination))
        return found

    @cached_property
    def _leaving(self) -> dict[str, list[PlannedRoute]]:
        return _grouped(self.outgoing, attrgetter("tensor.name"))


def _grouped(routes: Iterable[PlannedRoute], key: Callable[[PlannedRoute], str]) -> dict[str, list[PlannedRoute]]:
    found: dict[str, list[PlannedRoute]] = {}
    for route in routes:
        found.setdefault(key(route), []).append(route)
    return found


def queue_depth(when: Recurrence, window: int) -> int:
    """Micro-batches of one route that may be under way: three, and those of the route among ``window`` in a row.

    Between neighbours three are enough: one received, one waiting, one consumed. Each stage that a skip connection
    jumps over holds one micro-batch in computing and one in transfer, so the skipping tensor needs two more places, or
    the pipeline would stall on it; a stage with replicas holds more, and what a replica has finished ahead of a slower
    one waits before the next stage: `Program.leads` counts both. Of these a route sees only its own turns.
    """
    return 3 + (when.most_in(window) if window else 0)


def planned_routes(program: Program) -> tuple[PlannedRoute, ...]:
    """Every route of the program, those inside one machine included; a tensor's index is its place in ``producers``."""
    indexes = {name: index for index, name in enumerate(program.producers)}
    return tuple(
        PlannedRoute(
            tensor_index=indexes[route.tensor.name],
            tensor=route.tensor,
            source=route.source,
            destination=route.destination,
            queue_depth=queue_depth(route.when, route.window),
            when=route.when,
            codec=route.codec,
        )
        for route in program.handovers
    )


def machine_plan(program: Program, machine: str) -> MachinePlan:
    """The plan of ``machine``, which may be ``CLIENT``."""
    return plan_of_routes(machine, program.stages_on(machine), planned_routes(program))


def plan_of_routes(machine: str, stages: tuple[StageSpec, ...], routes: Iterable[PlannedRoute]) -> MachinePlan:
    """The plan of a machine with these stages; routes that do not touch it are left out."""
    known = tuple(routes)
    return MachinePlan(
        machine=machine,
        stages=stages,
        incoming=tuple(r for r in known if r.destination == machine != r.source),
        outgoing=tuple(r for r in known if r.source == machine != r.destination),
        local=tuple(r for r in known if r.source == r.destination == machine),
    )
