"""Routes of a program's tensors, and the part of a program that one machine, or the client, needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.codecs import CODECS, NONE
from rpc_runtime.program.round_robin import EVERY, Recurrence, cycle_of
from rpc_runtime.program.specs import StageSpec, TensorSpec

CLIENT = "client"
"""The client's name wherever a machine's name is allowed; no machine may have it."""


@dataclass(frozen=True)
class Route:
    """The transfer of a tensor from one machine (or the client) to another, once for each micro-batch of ``when``.

    If ``source == destination``, one stage passes the tensor to another stage of the same machine. ``index`` is the
    tensor's number on the wire. At most ``depth`` micro-batches are in flight. ``codec`` encodes the tensor if it
    crosses a network.
    """

    index: int
    tensor: TensorSpec
    source: str
    destination: str
    depth: int
    when: Recurrence = EVERY
    codec: str = NONE

    def __hash__(self) -> int:  # of the fields that tell routes apart: all of them take ten times as long
        return hash((self.index, self.source, self.destination))


@dataclass(frozen=True)
class MachineProgram:
    """The stages of a program on ``machine`` (or the client), and the routes that begin or end on it."""

    machine: str
    stages: tuple[StageSpec, ...]
    incoming: tuple[Route, ...]
    outgoing: tuple[Route, ...]
    local: tuple[Route, ...]

    @classmethod
    def of(cls, machine: str, stages: tuple[StageSpec, ...], routes: Iterable[Route]) -> MachineProgram:
        """Return the program of ``machine`` with these stages and those of ``routes`` that begin or end on it."""
        route_list = tuple(routes)
        return cls(
            machine,
            stages,
            incoming=tuple(r for r in route_list if r.destination == machine != r.source),
            outgoing=tuple(r for r in route_list if r.source == machine != r.destination),
            local=tuple(r for r in route_list if r.source == r.destination == machine),
        )

    @property
    def by_source(self) -> dict[str, list[Route]]:
        """The incoming routes by source machine."""
        return _grouped(self.incoming, attrgetter("source"))

    @property
    def by_destination(self) -> dict[str, list[Route]]:
        """The outgoing routes by destination machine."""
        return _grouped(self.outgoing, attrgetter("destination"))

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """(source, destination) of the links between this machine and other machines, without those of the client."""
        ends = ((route.source, route.destination) for route in (*self.incoming, *self.outgoing))
        return tuple(dict.fromkeys(link for link in ends if CLIENT not in link))

    @cached_property
    def period(self) -> int:
        """The number of micro-batches after which the routes of this machine repeat; 1 without replicas."""
        routes = (*self.incoming, *self.outgoing, *self.local)
        recurrences = (*(stage.micro_batches for stage in self.stages), *(route.when for route in routes))
        return cycle_of({recurrence.period for recurrence in recurrences})

    def destinations_of(self, tensor: str, sequence: int) -> tuple[str, ...]:
        """Return the machines to which this one sends a micro-batch of a tensor."""
        return tuple(route.destination for route in self._leaving.get(tensor, ()) if sequence in route.when)

    def sends(self, tensors: Sequence[TensorSpec]) -> list[list[tuple[str, int, str]]]:
        """Return the sends for each micro-batch of one period, as (name, position in ``tensors``, destination)."""
        sends: list[list[tuple[str, int, str]]] = [[] for _ in range(self.period)]
        for position, tensor in enumerate(tensors):
            for route in self._leaving.get(tensor.name, ()):
                for sequence in route.when.within(self.period):
                    sends[sequence].append((tensor.name, position, route.destination))
        return sends

    @cached_property
    def _leaving(self) -> dict[str, list[Route]]:
        return _grouped(self.outgoing, attrgetter("tensor.name"))


def _grouped(routes: Iterable[Route], key: Callable[[Route], str]) -> dict[str, list[Route]]:
    groups: dict[str, list[Route]] = {}
    for route in routes:
        groups.setdefault(key(route), []).append(route)
    return groups


def queue_depth(when: Recurrence, window: int) -> int:
    """Return the limit of a route's micro-batches in flight: 3, plus the most of its own in ``window`` successive ones.

    Three are enough between neighbours: one received, one waiting, one consumed. Each stage that a skip connection
    bypasses holds one micro-batch in computing and one in transfer. So the skipping tensor needs two more slots, or the
    pipeline would stall on it. A stage with replicas holds more, since micro-batches of a faster replica wait for a
    slower one. ``window`` is the number of both (`Program.leads`); a route counts only its own micro-batches of these.
    """
    return 3 + (when.most_in(window) if window else 0)


def require_available(routes: Iterable[Route]) -> None:
    """Raise a `WorkerError` that names the missing package if this process cannot use the codec of a route."""
    for route in routes:
        if not (codec := CODECS[route.codec]).is_available():
            raise WorkerError(
                f"tensor {route.tensor.name!r} goes from {route.source!r} to {route.destination!r} as "
                f"{route.codec}, which needs the package {codec.package!r} at both ends, and is missing: "
                "pip install 'tvm-split[codecs]', or give the link another codec"
            )
