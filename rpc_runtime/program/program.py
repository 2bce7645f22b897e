"""What is deployed: tensors, stages and how tensors flow between them, without a word about how it was compiled.

A *program* is a directed acyclic graph of stages. Tensors have names that are unique in the program; a stage lists
the tensors it takes and the tensors it makes, and every route follows from these lists. A stage may have *replicas* on
several machines, which take turns (`rpc_runtime.program.turns`): each has a specification of its own, with the name of
the stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

from rpc_runtime.program.codec import NONE, require_known, unfit
from rpc_runtime.program.routes import CLIENT, MachineProgram, Route, queue_depth
from rpc_runtime.program.turns import EVERY, Recurrence, cycle_of, turns_of


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (elements per axis) and dtype (numpy's name) of a dense, row-major tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class BlobSpec:
    """A file of ``size_bytes`` bytes, known by the SHA-256 of its content (lowercase hexadecimal)."""

    sha256: str
    size_bytes: int


NO_BLOB = BlobSpec("0" * 64, 0)
"""In the place of a library that a machine does not need to know: `Program.for_worker`."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight of a stage: a blob in safetensors format that holds exactly one tensor, named ``weight``."""

    tensor: TensorSpec
    blob: BlobSpec

    @property
    def content(self) -> tuple[str, tuple[int, ...], str]:
        """What is the same for all weights of equal values, shape and dtype."""
        return self.blob.sha256, self.tensor.shape, self.tensor.dtype


@dataclass(frozen=True)
class StageSpec:
    """One stage as it is deployed, or one replica of it.

    ``library`` is a shared library whose function ``main(*inputs, *weights)`` returns a tuple with one tensor per
    entry of ``outputs``, in order, whatever their number. ``device`` is ``"cpu"`` or ``"cuda"``; ``target`` says, for
    messages, what the library was compiled for.

    Micro-batch ``s`` is computed by the replica whose ``replica`` is ``turns[s % len(turns)]``. Replicas of a stage
    agree in ``index``, ``name``, ``layers``, ``inputs``, ``outputs`` and ``turns``; each is on a machine of its own.
    """

    index: int
    name: str
    machine: str
    layers: tuple[str, ...]
    device: str
    library: BlobSpec
    weights: tuple[WeightSpec, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    replica: int = 0
    turns: tuple[int, ...] = (0,)
    target: str = ""

    @cached_property
    def own_turns(self) -> Recurrence:
        """The micro-batches that this replica computes: every one if the stage has no others."""
        return turns_of(self.replica, self.turns)

    @property
    def blobs(self) -> tuple[BlobSpec, ...]:
        """The library and every weight, each digest once."""
        return tuple({blob.sha256: blob for blob in (self.library, *(w.blob for w in self.weights))}.values())


def weight_bytes(stages: Iterable[StageSpec]) -> int:
    """What a machine that has these stages holds of weights: each once, whatever its name in a stage."""
    return sum({each.content: each.tensor.size_bytes for stage in stages for each in stage.weights}.values())


@dataclass(frozen=True)
class RouteCodec:
    """The codec of the tensor of this name on its way from one machine (or the client) to another."""

    tensor: str
    source: str
    destination: str
    codec: str

    def __post_init__(self) -> None:
        require_known(self.codec)


@dataclass(frozen=True)
class InputCut:
    """What the client sends of a model input under another name: from ``begin`` along ``axis``, as ``tensor`` is."""

    tensor: TensorSpec
    input: str
    axis: int
    begin: int


@dataclass(frozen=True)
class Program:
    """Stages in topological order, replicas beside each other, and the model's own inputs and outputs.

    ``outputs`` may name a model input (it never leaves the client) or any stage's output, also several times.
    ``codecs`` are those of routes that have one. ``cuts`` of inputs are sent instead of these where a stage takes them.

    Raises:
        ValueError: the replicas of a stage do not fit together, the turns of all stages repeat together after more than
            `turns.LONGEST_CYCLE` micro-batches, a tensor is made twice or not before it is used, or a cut is not of an
            input.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    stages: tuple[StageSpec, ...]
    codecs: tuple[RouteCodec, ...] = ()
    cuts: tuple[InputCut, ...] = ()

    def __post_init__(self) -> None:
        for cut in self.cuts:
            _check_cut(cut, self.inputs)
        for replicas in self.replicas.values():
            _check_replicas(replicas)
        cycle_of(len(replicas[0].turns) for replicas in self.replicas.values())
        self._check_tensors()

    @property
    def given(self) -> tuple[TensorSpec, ...]:
        """What the client has: the inputs, and its cuts of them."""
        return (*self.inputs, *(cut.tensor for cut in self.cuts))

    @cached_property
    def cut_places(self) -> tuple[tuple[int, tuple[slice, ...]], ...]:
        """Of each cut, which input it is of, and where it lies there."""
        names = [tensor.name for tensor in self.inputs]
        return tuple(
            (
                names.index(cut.input),
                (slice(None),) * cut.axis + (slice(cut.begin, cut.begin + cut.tensor.shape[cut.axis]),),
            )
            for cut in self.cuts
        )

    @property
    def machines(self) -> tuple[str, ...]:
        """Machines that hold a stage, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.machine for stage in self.stages))

    def stages_on(self, machine: str) -> tuple[StageSpec, ...]:
        return tuple(stage for stage in self.stages if stage.machine == machine)

    @cached_property
    def replicas(self) -> dict[str, tuple[StageSpec, ...]]:
        """Stage name to its replicas, mostly one, in topological order."""
        found: dict[str, tuple[StageSpec, ...]] = {}
        for stage in self.stages:
            found[stage.name] = (*found.get(stage.name, ()), stage)
        return found

    @cached_property
    def producers(self) -> dict[str, tuple[StageSpec, ...]]:
        """Tensor name to the replicas of the stage that makes it; none for what the client has."""
        made: dict[str, tuple[StageSpec, ...]] = {tensor.name: () for tensor in self.given}
        for replicas in self.replicas.values():
            made.update((tensor.name, replicas) for tensor in replicas[0].outputs)
        return made

    def _check_tensors(self) -> None:
        """Raise `ValueError` unless each tensor is made once, before it is used, and with the same shape and dtype."""
        made = {tensor.name: tensor for tensor in self.given}
        for name, (stage, *_) in self.replicas.items():
            for tensor in stage.inputs:
                _check_use(tensor, made, stage.machine)
            for tensor in stage.outputs:
                if tensor.name in made:
                    raise ValueError(f"tensor {tensor.name!r} is made twice; the second time by stage {name!r}")
                made[tensor.name] = tensor
        for tensor in self.outputs:
            _check_use(tensor, made, CLIENT)

    def on(self, machine: str) -> MachineProgram:
        """Return the part that touches ``machine``, which may be `CLIENT`; a pure function of this program.

        Raises:
            ValueError: it has more than a worker takes, or a codec is of no route that it fits.
        """
        found = MachineProgram.of(machine, self.stages_on(machine), self._routes_by_machine.get(machine, ()))
        if machine != CLIENT:
            found.require_limits()
        return found

    def for_worker(self, machine: str) -> Program:
        """Return what the worker of ``machine`` is sent, whose `on` is the same for that machine.

        Of other machines' stages it has no libraries and weights, and no layers' names.
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
        return replace(self, stages=tuple(stages))

    @cached_property
    def _routes_by_machine(self) -> dict[str, list[Route]]:
        found: dict[str, list[Route]] = {}
        for route in self.handovers:
            for end in dict.fromkeys((route.source, route.destination)):
                found.setdefault(end, []).append(route)
        return found

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Every transfer: each tensor once per pair of machines, one of which makes it and the other needs it."""
        return tuple(route for route in self.handovers if route.source != route.destination)

    @cached_property
    def handovers(self) -> tuple[Route, ...]:
        """The routes, and what one stage hands to another on the same machine.

        Raises:
            ValueError: a codec is of no route that it fits.
        """
        ways: dict[tuple[str, str, str], tuple[TensorSpec, Recurrence, int]] = {}
        for tensor, destination, needed, lead in self._uses():
            for source, made, held in self._sources(tensor):
                when = made & needed
                if when is None or source == destination == CLIENT:
                    continue  # the two never meet, or a model input is an output: it never leaves the client
                window = lead - held - 2
                key = (tensor.name, source, destination)
                if key in ways:
                    when, window = ways[key][1] | when, max(ways[key][2], window)
                ways[key] = (tensor, when, window)
        indexes = {name: index for index, name in enumerate(self.producers)}
        codecs = {(each.tensor, each.source, each.destination): each.codec for each in self.codecs}
        routes = {
            key: Route(indexes[tensor.name], tensor, *key[1:], queue_depth(when, window), when, codecs.get(key, NONE))
            for key, (tensor, when, window) in ways.items()
        }
        _check_codecs(self.codecs, routes)
        return tuple(routes.values())

    def _uses(self) -> Iterator[tuple[TensorSpec, str, Recurrence, int]]:
        """Who needs which tensor: tensor, machine, for which micro-batches, and the lead there."""
        for stage in self.stages:
            for tensor in stage.inputs:
                yield tensor, stage.machine, stage.own_turns, self.leads[stage.name]
        for tensor in self.outputs:
            yield tensor, CLIENT, EVERY, self.results_lead

    def _sources(self, tensor: TensorSpec) -> Iterator[tuple[str, Recurrence, int]]:
        """Who makes a tensor: machine, for which micro-batches, and the lead there."""
        producers = self.producers[tensor.name]
        if not producers:
            yield CLIENT, EVERY, 0
        for stage in producers:
            yield stage.machine, stage.own_turns, self.leads[stage.name]

    @cached_property
    def depths(self) -> dict[str, int]:
        """Stage name to its depth: 1 if it needs only model inputs, else one more than its deepest producer."""
        depths: dict[str, int] = {}
        for name, (stage, *_) in self.replicas.items():
            before = [self.producers[tensor.name] for tensor in stage.inputs]
            depths[name] = 1 + max((depths[p[0].name] for p in before if p), default=0)
        return depths

    @cached_property
    def leads(self) -> dict[str, int]:
        """Stage name to how many micro-batches a full pipeline holds between the client and this stage's inputs.

        From the client to a first stage that is 2, from one stage to the next w + 1: one in transfer, and w inside the
        first, where w = 1 if it has no replicas, else the longest gap between two turns of one of its replicas: while
        that computes a micro-batch, the others may be done with the w - 1 after it.
        """
        leads: dict[str, int] = {}
        for name, (stage, *_) in self.replicas.items():
            before = [self.producers[tensor.name] for tensor in stage.inputs]
            leads[name] = max((self._lead_after(p[0].name, leads) for p in before if p), default=2)
        return leads

    @cached_property
    def results_lead(self) -> int:
        """The same for where the model's outputs arrive: what the whole pipeline holds when it is full."""
        return max((self._lead_after(name, self.leads) for name in self.replicas), default=2)

    def _lead_after(self, name: str, leads: dict[str, int]) -> int:
        return leads[name] + max(stage.own_turns.longest_gap for stage in self.replicas[name]) + 1


def _check_use(tensor: TensorSpec, made: Mapping[str, TensorSpec], user: str) -> None:
    """Raise `ValueError` if a tensor that a machine or the client uses is not made before, or made otherwise."""
    known = made.get(tensor.name)
    if known is None:
        raise ValueError(f"tensor {tensor.name!r} is used on {user!r}, and no input or earlier stage makes it")
    if known != tensor:
        raise ValueError(f"{user!r} takes {tensor}, and what is made is {known}")


def _check_codecs(codecs: Iterable[RouteCodec], routes: Mapping[tuple[str, str, str], Route]) -> None:
    """A `ValueError` that names the tensor of a codec that cannot be."""
    for each in codecs:
        route = routes.get((each.tensor, each.source, each.destination))
        where = f"the codec {each.codec} of tensor {each.tensor!r} from {each.source!r} to {each.destination!r}"
        if route is None or each.source == each.destination:
            crossing = sorted(
                {name for name, source, end in routes if (source, end) == (each.source, each.destination)}
            )
            raise ValueError(f"{where}: this tensor does not go that way; there go {', '.join(crossing) or 'none'}")
        if reason := unfit(each.codec, route.tensor):
            raise ValueError(f"{where} does not fit {route.tensor}: {reason}")


def _check_cut(cut: InputCut, inputs: Iterable[TensorSpec]) -> None:
    """A `ValueError` that names a cut which does not lie in its input."""
    whole = next((each for each in inputs if each.name == cut.input), None)
    if whole is None or cut.tensor.name in {each.name for each in inputs}:
        raise ValueError(f"{cut.tensor} is to be cut of the input {cut.input!r}, which is no other input")
    axis, length = cut.axis, cut.tensor.shape[cut.axis : cut.axis + 1]
    fits = (
        0 <= axis < len(whole.shape)
        and len(length) == 1
        and cut.begin >= 0
        and cut.begin + length[0] <= whole.shape[axis]
        and whole.shape[:axis] + length + whole.shape[axis + 1 :] == cut.tensor.shape
        and whole.dtype == cut.tensor.dtype
    )
    if not fits:
        raise ValueError(f"{cut.tensor}, from {cut.begin} of axis {axis}, does not lie in the input {whole}")


def _check_replicas(replicas: tuple[StageSpec, ...]) -> None:
    """A `ValueError` that names the stage if its replicas do not fit together."""
    first = replicas[0]
    where = f"stage {first.name!r} on {', '.join(repr(stage.machine) for stage in replicas)}"
    for stage in replicas[1:]:
        for field in ("index", "layers", "inputs", "outputs", "turns"):
            if getattr(stage, field) != getattr(first, field):
                raise ValueError(
                    f"{where}: replicas of a stage have the same {field}, but these are {getattr(first, field)} on "
                    f"{first.machine!r} and {getattr(stage, field)} on {stage.machine!r}"
                )
    if len({stage.machine for stage in replicas}) < len(replicas):
        raise ValueError(f"{where}: replicas of a stage are on different machines")
    numbers = sorted(stage.replica for stage in replicas)
    if numbers != list(range(len(replicas))) or set(first.turns) != set(numbers):
        raise ValueError(
            f"{where}: the replicas are numbered {numbers} and have the turns {list(first.turns)}; number them from 0 "
            f"and give each a turn"
        )
    for stage in replicas:
        try:
            stage.own_turns  # noqa: B018  (refuses turns of a wrong length)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
