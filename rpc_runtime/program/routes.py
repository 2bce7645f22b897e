"""Where the tensors of a program go, and the part of a program that one machine, or the client, has to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

from rpc_runtime.program.codec import NONE
from rpc_runtime.program.turns import EVERY, Recurrence, cycle_of

if TYPE_CHECKING:
    from rpc_runtime.program.program import StageSpec, TensorSpec

CLIENT = "client"
"""The name that stands for the client wherever a machine's name could stand; no machine may take it."""
MAXIMUM_STAGES = 256
"""Of a machine. Each is a library that is loaded, of which a process can hold some thousands."""
MAXIMUM_NEIGHBOURS = 64
"""Of a machine. Each is a data stream, or two."""
MAXIMUM_TENSOR_TURNS = 1 << 19
"""Tables say where each micro-batch goes: they have the turns of one period for every tensor of a machine."""


@dataclass(frozen=True)
class Route:
    """A tensor that goes from one machine (or the client) to another, once for each micro-batch of ``when``.

    ``source == destination`` is a tensor that one stage hands to another stage of the same machine. ``index`` is the
    tensor's number on the wire. At most ``depth`` micro-batches are under way. ``codec`` is what the tensor is written
    in where a network carries it.
    """

    index: int
    tensor: TensorSpec
    source: str
    destination: str
    depth: int
    when: Recurrence = EVERY
    codec: str = NONE


@dataclass(frozen=True)
class MachineProgram:
    """The part of a program that touches ``machine`` (or the client)."""

    machine: str
    stages: tuple[StageSpec, ...]
    incoming: tuple[Route, ...]
    outgoing: tuple[Route, ...]
    local: tuple[Route, ...]

    @classmethod
    def of(cls, machine: str, stages: tuple[StageSpec, ...], routes: Iterable[Route]) -> MachineProgram:
        """Return the program of a machine with these stages; ``routes`` that do not touch it are left out."""
        known = tuple(routes)
        return cls(
            machine,
            stages,
            incoming=tuple(r for r in known if r.destination == machine != r.source),
            outgoing=tuple(r for r in known if r.source == machine != r.destination),
            local=tuple(r for r in known if r.source == r.destination == machine),
        )

    @property
    def by_source(self) -> dict[str, list[Route]]:
        """The routes that come in, by the machine that they come from."""
        return _grouped(self.incoming, attrgetter("source"))

    @property
    def by_destination(self) -> dict[str, list[Route]]:
        """The routes that go out, by the machine that they lead to."""
        return _grouped(self.outgoing, attrgetter("destination"))

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """(source, destination) of the links between this machine and other ones; the client is none."""
        ends = ((route.source, route.destination) for route in (*self.incoming, *self.outgoing))
        return tuple(dict.fromkeys(link for link in ends if CLIENT not in link))

    @cached_property
    def period(self) -> int:
        """After so many micro-batches everything here goes the same ways again; 1 without replicas."""
        routes = (*self.incoming, *self.outgoing, *self.local)
        return cycle_of({turns.period for turns in _turns(self.stages, routes)})

    def require_limits(self) -> None:
        """Raise `ValueError` for more stages, neighbours or turns than a worker takes."""
        neighbours = {end for route in (*self.incoming, *self.outgoing) for end in (route.source, route.destination)}
        turns = 0
        for stage in self.stages:
            own = self.period // stage.own_turns.period * len(stage.own_turns.remainders)
            turns += own * (len(stage.inputs) + len(stage.outputs))
        for what, count, limit in (
            ("stages", len(self.stages), MAXIMUM_STAGES),
            ("neighbours", len(neighbours - {self.machine}), MAXIMUM_NEIGHBOURS),
            (f"turns of tensors in {self.period} micro-batches", turns, MAXIMUM_TENSOR_TURNS),
        ):
            if count > limit:
                raise ValueError(f"machine {self.machine!r} has {count} {what}, at most {limit} are allowed")

    def destinations_of(self, tensor: str, sequence: int) -> tuple[str, ...]:
        """Return the other machines that a micro-batch of a tensor goes to from here."""
        return tuple(route.destination for route in self._leaving.get(tensor, ()) if sequence in route.when)

    def sends(self, tensors: Sequence[TensorSpec]) -> list[list[tuple[str, int, str]]]:
        """Return which of these go where, by the place of a micro-batch in the period: name, position, machine."""
        found: list[list[tuple[str, int, str]]] = [[] for _ in range(self.period)]
        for position, tensor in enumerate(tensors):
            for route in self._leaving.get(tensor.name, ()):
                for turn in route.when.within(self.period):
                    found[turn].append((tensor.name, position, route.destination))
        return found

    @cached_property
    def _leaving(self) -> dict[str, list[Route]]:
        return _grouped(self.outgoing, attrgetter("tensor.name"))


def _turns(stages: Iterable[StageSpec], routes: Iterable[Route]) -> list[Recurrence]:
    return [stage.own_turns for stage in stages] + [route.when for route in routes]


def _grouped(routes: Iterable[Route], key: Callable[[Route], str]) -> dict[str, list[Route]]:
    found: dict[str, list[Route]] = {}
    for route in routes:
        found.setdefault(key(route), []).append(route)
    return found


def queue_depth(when: Recurrence, window: int) -> int:
    """Return how many micro-batches of a route may be under way: three, and the route's among ``window`` in a row.

    Between neighbours three are enough: one received, one waiting, one consumed. Each stage that a skip connection
    jumps over holds one micro-batch in computing and one in transfer, so the skipping tensor needs two more slots, or
    the pipeline would stall on it; a stage with replicas holds more, and what a replica has finished ahead of a slower
    one waits before the next stage: `Program.leads` counts both. Of these a route sees only its own turns.
    """
    return 3 + (when.most_in(window) if window else 0)
