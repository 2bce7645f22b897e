"""The deployed program: tensors, stages, and the routes of tensors between them, independent of the compiler.

A *program* is a directed acyclic graph of stages. The names of tensors are unique in the program. A stage lists the
tensors that it takes and makes, and all routes follow from these lists. A stage may have *replicas* on several machines
with a round-robin schedule (`rpc_runtime.program.round_robin`). Each replica has its own specification with the
stage's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rpc_runtime.program.codecs import CODECS, NONE
from rpc_runtime.program.round_robin import EVERY, Recurrence, cycle_of
from rpc_runtime.program.routes import CLIENT, MachineProgram, Route, queue_depth
from rpc_runtime.program.specs import NO_BLOB, StageSpec, TensorSpec


@dataclass(frozen=True)
class RouteCodec:
    """The codec of a tensor on the route from one machine (or the client) to another."""

    tensor: str
    source: str
    destination: str
    codec: str

    def __post_init__(self) -> None:
        _ = CODECS[self.codec]  # raises `InputError` for an unknown name


@dataclass(frozen=True)
class InputSlice:
    """A slice of a model input that the client sends as ``tensor``: from ``begin`` along ``axis``."""

    tensor: TensorSpec
    input: str
    axis: int
    begin: int


@dataclass(frozen=True)
class Program:
    """Stages in topological order, replicas next to each other, and the model's inputs and outputs.

    ``outputs`` may name a model input (it never leaves the client) or any stage's output, also several times.
    ``codecs`` has the codecs of the routes that have one. ``input_slices`` are sent to the stages that take these
    instead of the input. ``output_names`` are the outputs' names in the source; workers do not get them.

    Raises:
        ValueError: the replicas of a stage do not fit together, the schedules of all stages repeat together after more
            than `round_robin.LONGEST_CYCLE` micro-batches, a tensor is made twice or not before it is used, or a
            slice does not lie in its input.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    stages: tuple[StageSpec, ...]
    codecs: tuple[RouteCodec, ...] = ()
    input_slices: tuple[InputSlice, ...] = ()
    output_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in self.input_slices:
            _check_slice(part, self.inputs)
        for replicas in self.replicas.values():
            _check_replicas(replicas)
        _ = self.cycle  # raises `ValueError` if it is too long
        self._check_tensors()

    @cached_property
    def cycle(self) -> int:
        """The number of micro-batches after which the schedules of all stages repeat together."""
        return cycle_of(len(replicas[0].replica_schedule) for replicas in self.replicas.values())

    @property
    def client_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the client: the model's inputs, and the slices of inputs that it sends (``input_slices``)."""
        return (*self.inputs, *(part.tensor for part in self.input_slices))

    @cached_property
    def slice_indices(self) -> tuple[tuple[int, tuple[slice, ...]], ...]:
        """For each of the ``input_slices``: the position of its model input, and the index that slices it."""
        names = [tensor.name for tensor in self.inputs]
        return tuple(
            (
                names.index(part.input),
                (slice(None),) * part.axis + (slice(part.begin, part.begin + part.tensor.shape[part.axis]),),
            )
            for part in self.input_slices
        )

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines that have a stage, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.machine for stage in self.stages))

    def stages_on(self, machine: str) -> tuple[StageSpec, ...]:
        return tuple(stage for stage in self.stages if stage.machine == machine)

    @cached_property
    def replicas(self) -> dict[str, tuple[StageSpec, ...]]:
        """The replicas (often one) by stage name, in topological order."""
        by_name: dict[str, tuple[StageSpec, ...]] = {}
        for stage in self.stages:
            by_name[stage.name] = (*by_name.get(stage.name, ()), stage)
        return by_name

    @cached_property
    def producers(self) -> dict[str, tuple[StageSpec, ...]]:
        """The replicas of the producing stage by tensor name; empty for the client's tensors."""
        producers: dict[str, tuple[StageSpec, ...]] = {tensor.name: () for tensor in self.client_tensors}
        for replicas in self.replicas.values():
            producers.update((tensor.name, replicas) for tensor in replicas[0].outputs)
        return producers

    def _check_tensors(self) -> None:
        """Raise `ValueError` unless each tensor is made once and before it is used, with the same shape and dtype."""
        tensors = {tensor.name: tensor for tensor in self.client_tensors}
        for name, (stage, *_) in self.replicas.items():
            for tensor in stage.inputs:
                _check_use(tensor, tensors, stage.machine)
            for tensor in stage.outputs:
                if tensor.name in tensors:
                    raise ValueError(f"tensor {tensor.name!r} is made twice; the second time by stage {name!r}")
                tensors[tensor.name] = tensor
        for tensor in self.outputs:
            _check_use(tensor, tensors, CLIENT)

    def on(self, machine: str) -> MachineProgram:
        """Return the stages and routes of ``machine``, which may be `CLIENT`; a pure function of this program.

        Raises:
            ValueError: a codec does not fit its route.
        """
        return MachineProgram.of(machine, self.stages_on(machine), self._routes_by_machine.get(machine, ()))

    def for_worker(self, machine: str) -> Program:
        """Return the program to send to the worker of ``machine``; its `on` is the same for that machine.

        The stages of other machines have no library and no weights. They have no layer names, except for replicas of
        this machine's stages.
        """
        names = {stage.name for stage in self.stages_on(machine)}
        stages = [
            stage
            if stage.machine == machine
            else replace(
                stage, library=NO_BLOB, weights=(), target="", layers=stage.layers if stage.name in names else ()
            )
            for stage in self.stages
        ]
        return replace(self, stages=tuple(stages), output_names=())

    @cached_property
    def _routes_by_machine(self) -> dict[str, list[Route]]:
        by_machine: dict[str, list[Route]] = {}
        for route in self.handovers:
            for end in dict.fromkeys((route.source, route.destination)):
                by_machine.setdefault(end, []).append(route)
        return by_machine

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The transfers between machines: each tensor once per pair of a producing and a consuming machine."""
        return tuple(route for route in self.handovers if route.source != route.destination)

    @cached_property
    def handovers(self) -> tuple[Route, ...]:
        """The transfers between machines, and the tensors passed between stages of one machine.

        Raises:
            ValueError: a codec has no route, or does not fit it.
        """
        ways: dict[tuple[str, str, str], tuple[TensorSpec, Recurrence, int]] = {}
        for tensor, destination, needed, lead in self._uses():
            for source, produced, held in self._sources(tensor):
                when = produced & needed
                if when is None or source == destination == CLIENT:
                    continue  # no common micro-batch, or an output that is a model input: it never leaves the client
                window = lead - held - 2
                key = (tensor.name, source, destination)
                if key in ways:
                    when, window = ways[key][1] | when, max(ways[key][2], window)
                ways[key] = (tensor, when, window)
        indexes = {name: index for index, name in enumerate(self.producers)}
        codecs = {(codec.tensor, codec.source, codec.destination): codec.codec for codec in self.codecs}
        routes = {
            key: Route(indexes[tensor.name], tensor, *key[1:], queue_depth(when, window), when, codecs.get(key, NONE))
            for key, (tensor, when, window) in ways.items()
        }
        _check_codecs(self.codecs, routes)
        return tuple(routes.values())

    def _uses(self) -> Iterator[tuple[TensorSpec, str, Recurrence, int]]:
        """Yield each use of a tensor: (tensor, machine, consumed micro-batches, value in `leads` or `results_lead`)."""
        for stage in self.stages:
            for tensor in stage.inputs:
                yield tensor, stage.machine, stage.micro_batches, self.leads[stage.name]
        for tensor in self.outputs:
            yield tensor, CLIENT, EVERY, self.results_lead

    def _sources(self, tensor: TensorSpec) -> Iterator[tuple[str, Recurrence, int]]:
        """Yield each source of a tensor: (machine, produced micro-batches, value in `leads`; 0 for the client)."""
        producers = self.producers[tensor.name]
        if not producers:
            yield CLIENT, EVERY, 0
        for stage in producers:
            yield stage.machine, stage.micro_batches, self.leads[stage.name]

    @cached_property
    def leads(self) -> dict[str, int]:
        """The number of micro-batches that a full pipeline holds between the client and each stage's inputs, by name.

        From the client to a first stage it is 2. From one stage to the next it is w + 1: one in transfer and w in the
        first stage. Without replicas w = 1. Otherwise w is the longest gap between two micro-batches of one replica.
        While that replica computes a micro-batch, the others may finish the w - 1 after it.
        """
        leads: dict[str, int] = {}
        for name, (stage, *_) in self.replicas.items():
            before = [self.producers[tensor.name] for tensor in stage.inputs]
            leads[name] = max((self._lead_after(p[0].name, leads) for p in before if p), default=2)
        return leads

    @cached_property
    def results_lead(self) -> int:
        """The number of micro-batches that the whole pipeline holds when it is full."""
        return max((self._lead_after(name, self.leads) for name in self.replicas), default=2)

    def _lead_after(self, name: str, leads: dict[str, int]) -> int:
        return leads[name] + max(stage.micro_batches.longest_gap for stage in self.replicas[name]) + 1


def _check_use(tensor: TensorSpec, tensors: Mapping[str, TensorSpec], user: str) -> None:
    """Raise `ValueError` if a used tensor is not made before, or is made with another shape or dtype."""
    produced = tensors.get(tensor.name)
    if produced is None:
        raise ValueError(f"tensor {tensor.name!r} is used on {user!r}, and no input or earlier stage makes it")
    if produced != tensor:
        raise ValueError(f"{user!r} takes {tensor}, and what is made is {produced}")


def _check_codecs(codecs: Iterable[RouteCodec], routes: Mapping[tuple[str, str, str], Route]) -> None:
    """Raise `ValueError` for a codec that has no route, or does not fit its tensor."""
    for codec in codecs:
        route = routes.get((codec.tensor, codec.source, codec.destination))
        where = f"the codec {codec.codec} of tensor {codec.tensor!r} from {codec.source!r} to {codec.destination!r}"
        if route is None or codec.source == codec.destination:
            tensors = sorted(
                {name for name, source, end in routes if (source, end) == (codec.source, codec.destination)}
            )
            raise ValueError(
                f"{where}: this tensor does not take that route; tensors on it: {', '.join(tensors) or 'none'}"
            )
        if reason := CODECS[codec.codec](route.tensor).unfit:
            raise ValueError(f"{where} does not fit {route.tensor}: {reason}")


def _check_slice(part: InputSlice, inputs: Iterable[TensorSpec]) -> None:
    """Raise `ValueError` if a slice does not lie in its input."""
    whole = next((tensor for tensor in inputs if tensor.name == part.input), None)
    if whole is None or part.tensor.name in {tensor.name for tensor in inputs}:
        raise ValueError(f"{part.tensor} is a slice of {part.input!r}, which is not another input")
    axis, length = part.axis, part.tensor.shape[part.axis : part.axis + 1]
    fits = (
        0 <= axis < len(whole.shape)
        and len(length) == 1
        and part.begin >= 0
        and part.begin + length[0] <= whole.shape[axis]
        and whole.shape[:axis] + length + whole.shape[axis + 1 :] == part.tensor.shape
        and whole.dtype == part.tensor.dtype
    )
    if not fits:
        raise ValueError(f"{part.tensor}, from {part.begin} of axis {axis}, does not lie in the input {whole}")


def _check_replicas(replicas: tuple[StageSpec, ...]) -> None:
    """Raise `ValueError` if the replicas of a stage do not fit together."""
    first = replicas[0]
    where = f"stage {first.name!r} on {', '.join(repr(stage.machine) for stage in replicas)}"
    for stage in replicas[1:]:
        for name in ("index", "layers", "inputs", "outputs", "replica_schedule"):
            if getattr(stage, name) != getattr(first, name):
                raise ValueError(
                    f"{where}: replicas of a stage have the same {name}, but these are {getattr(first, name)} on "
                    f"{first.machine!r} and {getattr(stage, name)} on {stage.machine!r}"
                )
    if len({stage.machine for stage in replicas}) < len(replicas):
        raise ValueError(f"{where}: replicas of a stage are on different machines")
    numbers = sorted(stage.replica for stage in replicas)
    if numbers != list(range(len(replicas))) or set(first.replica_schedule) != set(numbers):
        raise ValueError(
            f"{where}: the replicas are numbered {numbers} and have the schedule {list(first.replica_schedule)}; "
            "number them from 0 and name each in the schedule"
        )
    for stage in replicas:
        try:
            stage.micro_batches  # noqa: B018  (refuses schedules of a wrong length)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
