"""Planning problems as arrays: pieces in topological order, machines and links by number, edges as tensors."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import PlanError
from tvm_split.placement.evaluate import NumberedStep, missing_link
from tvm_split.placement.graph import grouped
from tvm_split.placement.problem import Problem, require_valid
from tvm_split.placement.step_graph import MachineSet

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
MOST_STEPS = 4096
"""Number of stages and links whose numbers are remembered: two plans that are compared differ in few of them."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that ``source`` sends once to every other machine that holds one of ``destinations``.

    Pieces are numbers in topological order; the client is `Instance.client` at either end.
    """

    source: int
    destinations: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class Instance:
    """A problem of n pieces and M machines as arrays; the client has the number ``client``, -1, the last index.

    Attributes:
        pieces: names in a topological order: the problem's own order if all its edges point forward.
        times: (n, M) seconds of each piece on each machine; infinite if the problem has no time for it.
        seconds: (n, M) like ``times``, but also infinite where a pin or a missing client link forbids the piece.
        weight_bytes, activation_bytes: (n,). memory_bytes: (M,).
        linked, seconds_per_byte, latency: (M + 1, M + 1), row the source; 0 where not linked. The last is the client.
        transfer_seconds, transfer_seconds_per_byte, contention: (M,).
        core_sets: for each set of shared cores, the numbers of its machines (with `client` if it shares them), and the
            number of cores.
    """

    problem: Problem
    pieces: tuple[str, ...]
    machines: tuple[str, ...]
    times: Floats
    seconds: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    memory_bytes: Floats
    linked: Flags
    seconds_per_byte: Floats
    latency: Floats
    transfer_seconds: Floats
    transfer_seconds_per_byte: Floats
    contention: Floats
    tensors: tuple[Tensor, ...]
    core_sets: tuple[tuple[tuple[int, ...], int], ...]

    client = -1

    @cached_property
    def piece_number(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.pieces)}

    @cached_property
    def machine_number(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.machines)}

    @cached_property
    def before(self) -> list[set[int]]:
        """The direct predecessors of each piece."""
        before: list[set[int]] = [set() for _ in self.pieces]
        for tensor in self.tensors:
            for piece in tensor.destinations:
                if self.client not in (piece, tensor.source):
                    before[piece].add(tensor.source)
        return before

    @cached_property
    def behind(self) -> list[list[int]]:
        """The direct successors of each piece, in their order."""
        return [
            [later for later in range(piece + 1, len(self.pieces)) if piece in self.before[later]]
            for piece in range(len(self.pieces))
        ]

    @cached_property
    def is_line(self) -> bool:
        """Whether each piece but the first reads the piece before it, so that there is one topological order."""
        return all(piece - 1 in self.before[piece] for piece in range(1, len(self.pieces)))

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Classes of machines that can be exchanged without changing a plan's value, ordered by first machine."""
        likely: dict[Hashable, list[list[int]]] = {}
        for machine in range(len(self.machines)):
            sets = tuple(place for place, (members, _) in enumerate(self.core_sets) if machine in members)
            unnamed = replace(self.problem.machines[machine], name="")
            classes = likely.setdefault((unnamed, self.seconds[:, machine].tobytes(), sets), [])
            identical = next((members for members in classes if self._have_same_links(members[0], machine)), None)
            if identical is None:
                classes.append([machine])
            else:
                identical.append(machine)
        return tuple(sorted(tuple(members) for classes in likely.values() for members in classes))

    def _have_same_links(self, first: int, second: int) -> bool:
        """Whether two machines have equal links to and from all others, and to each other."""
        rest = np.ones(len(self.linked), dtype=bool)
        rest[[first, second]] = False
        return all(
            values[first, second] == values[second, first]
            and np.array_equal(values[first, rest], values[second, rest])
            and np.array_equal(values[rest, first], values[rest, second])
            for values in (self.linked, self.seconds_per_byte, self.latency)
        )

    @cached_property
    def class_links(self) -> tuple[Floats, Floats]:
        """(K + 1, K + 1) seconds per byte and latency from one class to another; infinite latency without a link.

        The diagonal is between two machines of one class. The last row and column are the client's.
        """
        first, last = ([*(members[place] for members in self.classes), self.client] for place in (0, -1))
        ends = np.ix_(first, last)
        return self.seconds_per_byte[ends], np.where(self.linked[ends], self.latency[ends], math.inf)

    @cached_property
    def step(self) -> Callable[[MachineSet, tuple[int, ...]], NumberedStep]:
        """The function that returns the step of pieces on machines; it remembers the steps of the last plans."""
        return lru_cache(MOST_STEPS)(self._step)

    def _step(self, machines: MachineSet, pieces: tuple[int, ...]) -> NumberedStep:
        held = list(pieces)
        seconds = [math.fsum(self.times[held, machine]) for machine in machines]
        shares = () if len(machines) > 1 else (1.0,)
        weight_bytes = math.fsum(self.weight_bytes[held])
        activation_bytes = float(self.activation_bytes[held].max())
        return NumberedStep(machines, shares, seconds, max(seconds), weight_bytes, activation_bytes)

    @cached_property
    def is_allowed(self) -> Callable[[MachineSet, tuple[int, ...]], bool]:
        """The function that says whether all pieces may be on all machines."""
        return lru_cache(MOST_STEPS)(
            lambda machines, pieces: bool(np.isfinite(self.seconds[np.ix_(pieces, machines)]).all())
        )

    @cached_property
    def between(self) -> Callable[[MachineSet, MachineSet], tuple[float, float]]:
        """The function that returns latency (s) and seconds per byte of the slowest link; see `evaluate.Links`."""
        return lru_cache(MOST_STEPS)(self._between)

    def _between(self, sources: MachineSet, targets: MachineSet) -> tuple[float, float]:
        pairs = np.ix_(sources, targets)
        missing = np.argwhere(~self.linked[pairs])
        if len(missing):
            names = (*self.machines, CLIENT)
            raise missing_link(names[sources[missing[0, 0]]], names[targets[missing[0, 1]]])
        return float(self.latency[pairs].max()), float(self.seconds_per_byte[pairs].max())

    @property
    def machine_limit(self) -> int:
        """Most machines that a plan may use."""
        return min(self.problem.maximum_machines or len(self.machines), len(self.machines))


def instance_of(problem: Problem) -> Instance:
    """Validate a problem and return it as arrays.

    Raises:
        PlanError: names are unknown or duplicate, numbers are invalid, or the edges form a cycle.
    """
    require_valid(problem)
    order = _topological_order(problem)
    number = {problem.pieces[old].name: new for new, old in enumerate(order)} | {CLIENT: Instance.client}
    machines = tuple(machine.name for machine in problem.machines)
    end = {name: place for place, name in enumerate(machines)} | {CLIENT: Instance.client}
    pieces = [problem.pieces[old] for old in order]
    linked, seconds_per_byte, latency = _links(problem, machines)
    times = np.array([[piece.seconds.get(name, math.inf) for name in machines] for piece in pieces], dtype=np.float64)
    instance = Instance(
        problem=problem,
        pieces=tuple(piece.name for piece in pieces),
        machines=machines,
        times=times,
        seconds=times.copy(),
        weight_bytes=np.array([piece.weight_bytes for piece in pieces], dtype=float),
        activation_bytes=np.array([piece.activation_bytes for piece in pieces], dtype=float),
        memory_bytes=np.array([machine.memory_bytes for machine in problem.machines], dtype=float),
        linked=linked,
        seconds_per_byte=seconds_per_byte,
        latency=latency,
        transfer_seconds=np.array([machine.transfer_seconds for machine in problem.machines]),
        transfer_seconds_per_byte=np.array([machine.transfer_seconds_per_byte for machine in problem.machines]),
        contention=np.array([machine.contention for machine in problem.machines]),
        tensors=_tensors(problem, number),
        core_sets=tuple((tuple(end[name] for name in cores.machines), cores.cores) for cores in problem.shared_cores),
    )
    _forbid(instance)
    return instance


def _topological_order(problem: Problem) -> list[int]:
    """Return a topological order of piece indices; among ready pieces, the first in the problem comes next."""
    number = {piece.name: place for place, piece in enumerate(problem.pieces)}
    before: dict[int, set[int]] = {place: set() for place in number.values()}
    for edge in problem.edges:
        if CLIENT not in (edge.source, edge.destination):
            before[number[edge.destination]].add(number[edge.source])
    groups = grouped(before)
    stuck = next((group for group in groups if len(group) > 1), None)
    if stuck is not None:
        names = ", ".join(repr(problem.pieces[place].name) for place in stuck[:6])
        raise PlanError(f"the edges form a cycle among {names}; no piece of it can run first")
    return [place for (place,) in groups]


def _links(problem: Problem, machines: Sequence[str]) -> tuple[Flags, Floats, Floats]:
    number = {name: place for place, name in enumerate((*machines, CLIENT))}
    linked = np.zeros((len(number), len(number)), dtype=bool)
    seconds_per_byte, latency = np.zeros(linked.shape), np.zeros(linked.shape)
    at = [number[link.source] for link in problem.links], [number[link.destination] for link in problem.links]
    linked[at] = True
    seconds_per_byte[at] = [1.0 / link.bytes_per_second for link in problem.links]
    latency[at] = [link.latency_seconds for link in problem.links]
    return linked, seconds_per_byte, latency


def _tensors(problem: Problem, number: dict[str, int]) -> tuple[Tensor, ...]:
    destinations: dict[tuple[str, str | int], dict[int, None]] = {}
    size: dict[tuple[str, str | int], float] = {}
    for index, edge in enumerate(problem.edges):
        key = edge.source, index if edge.tensor is None else edge.tensor
        destinations.setdefault(key, {})[number[edge.destination]] = None
        size[key] = edge.bytes
    return tuple(Tensor(number[key[0]], tuple(ends), size[key]) for key, ends in destinations.items())


def _forbid(instance: Instance) -> None:
    """Set ``seconds`` to infinity where a pin or a missing link from or to the client forbids a piece."""
    for tensor in instance.tensors:
        for destination in tensor.destinations:
            if tensor.source == instance.client:
                instance.seconds[destination, ~instance.linked[-1, :-1]] = math.inf
            elif destination == instance.client:
                instance.seconds[tensor.source, ~instance.linked[:-1, -1]] = math.inf
    for pin in instance.problem.pins:
        piece, machine = instance.piece_number[pin.piece], instance.machine_number[pin.machine]
        if pin.forbidden:
            instance.seconds[piece, machine] = math.inf
        else:
            instance.seconds[piece, [index for index in range(len(instance.machines)) if index != machine]] = math.inf
