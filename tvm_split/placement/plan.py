"""A plan: stages, the machines that run them and the layers they hold. It can be saved as a file and edited."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from rpc_runtime.program.codecs import CODECS
from rpc_runtime.program.round_robin import cycle_of
from rpc_runtime.program.specs import TensorSpec
from tvm_split.cluster.machine import MOST_CORES
from tvm_split.errors import PlanError
from tvm_split.placement.prediction import Prediction
from tvm_split.placement.problem import SHARES_TOLERANCE, Objective, Precision, Stage
from tvm_split.placement.request import PlanRequest
from tvm_split.units import Shown, known_names, short_list
from tvm_split.values import Document, content_of, first_repeated, write

FORMAT = "tvm-split plan"
VERSION = 2
OF_THE_PLAN = ("objective", "precision")
"""Fields of the request that a plan file stores once, as fields of the plan."""


@dataclass(frozen=True)
class PlannedMachine:
    """The machine that a stage is compiled for: its name, TVM target (as a dictionary) and number of threads.

    ``address`` is where its worker listened when the plan was made; None for the workers of a local cluster.
    """

    name: str
    target: Mapping[str, Any]
    threads: Annotated[int, Field(ge=1, le=MOST_CORES)]
    address: str | None = None


@dataclass(frozen=True)
class PlannedCodec:
    """The codec of the tensor of this name on the link from one machine (or the client) to another.

    ``ratio`` and ``output_error`` are those of a `CodecTrial` on the model's example inputs; None where no trial was
    possible, except for the ratio of a lossy codec, which is the same for all values.
    """

    tensor: str
    source: str
    destination: str
    codec: str
    ratio: float | None = None
    output_error: float | None = None

    def __post_init__(self) -> None:
        CODECS[self.codec]


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """Stages in topological order; every layer of the model is in exactly one.

    ``origin`` says in a few words how the plan was found. ``prediction`` is for exactly these stages and codecs; it is
    None for a plan that was made or changed by hand. ``codecs`` are those of the tensors that have one on a link.
    ``remarks`` name requested codecs that have no effect, and what stays in float32 although convolutions and products
    take their operands in ``precision``. ``request`` is the request to the planner, and ``inputs`` and ``graph_digest``
    are the model's at that time; a plan that was written by hand has none.

    Raises:
        PlanError: there is no round-robin schedule for the replicas of a stage, or of all stages together; two
            replicas or shards of a stage are on one machine; two machines or stages have one name, or a stage has a
            layer twice; an input's dtype is unknown.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str
    objective: Objective
    origin: str
    machines: tuple[PlannedMachine, ...]
    stages: tuple[Stage, ...]
    prediction: Prediction | None = None
    codecs: tuple[PlannedCodec, ...] = ()
    remarks: tuple[str, ...] = ()
    precision: Precision = "float32"
    request: PlanRequest = field(default_factory=PlanRequest)
    inputs: tuple[TensorSpec, ...] = ()
    graph_digest: str = ""

    def __post_init__(self) -> None:
        _check_names("machines", [machine.name for machine in self.machines])
        _check_names("stages", [stage.name for stage in self.stages])
        for stage in self.stages:
            _check_stage(stage)
        for spec in self.inputs:
            _check_dtype(spec)
        try:
            cycle_of(len(stage.replica_schedule) for stage in self.stages)
        except ValueError as error:
            lengths = {stage.name: len(stage.replica_schedule) for stage in self.stages}
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items() if length > 1)
            raise PlanError(f"round-robin schedules of the lengths {listed}: {error}") from None

    def machine(self, name: str) -> PlannedMachine:
        for machine in self.machines:
            if machine.name == name:
                return machine
        known = known_names([machine.name for machine in self.machines], name)
        raise PlanError(f"the plan names no machine {name!r}; it has {known}")

    def renamed(self, names: Mapping[str, str]) -> Plan:
        """Return the plan with machines renamed; ``names`` maps old names to new ones.

        Raises:
            PlanError: the plan has no machine of an old name, or two machines would have the same new one.
        """
        for name in names:
            self.machine(name)
        machines = tuple(replace(machine, name=names.get(machine.name, machine.name)) for machine in self.machines)
        new_names = [machine.name for machine in machines]
        twice = first_repeated(new_names)
        if twice is not None:
            raise PlanError(f"two machines of the plan would be named {twice!r}; rename both")
        plan: Plan = with_machine_names(self, names)
        return replace(plan, machines=machines)

    @property
    def in_flight(self) -> int | None:
        """The most micro-batches of a stream in flight; None unless the plan is for latency and from measurements."""
        if self.objective == "throughput" or self.prediction is None or self.prediction.profiled_at == 0:
            return None
        return self.prediction.in_flight

    def machines_by_target(self, stage: Stage) -> list[list[str]]:
        """The machines of a stage, grouped by equal targets: the replicas of a group share a library."""
        groups: dict[str, list[str]] = {}
        for machine in stage.machines:
            target = json.dumps(dict(self.machine(machine).target), sort_keys=True)
            groups.setdefault(target, []).append(machine)
        return list(groups.values())

    def to_dict(self) -> dict[str, Any]:
        """The content of the plan's file; a digest in the prediction identifies its stages, codecs and precision."""
        content = {"format": FORMAT, "version": VERSION, **content_of(self)}
        if self.prediction is not None:
            content["prediction"] = {"for_stages": _digest(self), **content["prediction"]}
        if "request" in content:
            request_fields = content.pop("request").items()
            content["request"] = {name: value for name, value in request_fields if name not in OF_THE_PLAN}
        return content

    def save(self, path: str | Path) -> None:
        write(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises a `PlanError` that says what is wrong and where."""
        return _plan_in(Document.read(path, PlanError))

    @classmethod
    def from_dict(cls, content: Any, source: str = "plan") -> Plan:
        """The plan in a result of `to_dict`; errors as of `load`."""
        return _plan_in(Document(source, content, PlanError))


MACHINE_FIELDS = ("machine", "machines", "source", "destination", "compute_ratios", "link_speeds", "pin", "keep_off")
"""Fields of a plan's, a request's and a program's values that hold names of machines."""
MACHINE_KEYS = ("split", "shares")
"""Fields whose keys are names of machines."""
OTHER_NAMES = ("transfers",)
"""Fields that hold other names: sources and destinations of a prediction's transfers are steps."""


def with_machine_names(value: Any, names: Mapping[str, str], of_field: str = "") -> Any:
    """Return ``value`` with machines renamed in all its dataclasses and collections; ``names`` maps old to new names.

    ``of_field`` is the name of the dataclass field that holds ``value``; it decides which texts are names of machines.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kept = [part.name for part in fields(value) if part.name not in OTHER_NAMES]
        return replace(value, **{name: with_machine_names(getattr(value, name), names, name) for name in kept})
    if isinstance(value, tuple):
        return tuple(with_machine_names(part, names, of_field) for part in value)
    if isinstance(value, Mapping):
        keys = names if of_field in MACHINE_KEYS else {}
        return {keys.get(key, key): with_machine_names(part, names, of_field) for key, part in value.items()}
    return names.get(value, value) if of_field in MACHINE_FIELDS and isinstance(value, str) else value


def _plan_in(document: Document) -> Plan:
    content, source = document.content, document.source
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        answer = isinstance(content, dict) and {"stages", "predicted"} <= content.keys()
        hint = "; `tvm-split simulate` takes an answer of `tvm-split solve` with its --problem" if answer else ""
        raise PlanError(
            f"{source} is no plan, which `tvm-split plan --output` writes: it should say format {FORMAT!r}{hint}"
        )
    if content.get("version") != VERSION:
        raise PlanError(
            f"{source} is a plan of version {content.get('version')!r}, and this tvm-split reads version {VERSION!r}; "
            "plan again"
        )
    values = {key: value for key, value in content.items() if key not in ("format", "version")}
    if isinstance(request := values.get("request", {}), dict):
        values["request"] = {**request, **{name: values[name] for name in OF_THE_PLAN if name in values}}
    prediction = values.get("prediction")
    digest = None
    if isinstance(prediction, dict):
        digest = prediction.get("for_stages")
        values["prediction"] = {key: value for key, value in prediction.items() if key != "for_stages"}
    plan = replace(document, content=values).value(Plan)
    for kind, entries in (("machines", plan.machines), ("stages", plan.stages)):
        if not entries:
            raise PlanError(f"{source}: the plan has no {kind}; give at least one")
    for stage in plan.stages:
        if not stage.name.isidentifier():
            raise PlanError(f"{source}: a stage is named {stage.name!r}; use letters, digits and underscores")
    try:
        for machine in (machine for stage in plan.stages for machine in stage.machines):
            plan.machine(machine)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None
    # If the stages were edited, the prediction for the old ones is no longer valid.
    return plan if digest == _digest(plan) else replace(plan, prediction=None)


def _check_names(kind: str, names: Sequence[str]) -> None:
    twice = first_repeated(names)
    if twice is not None:
        raise PlanError(f"two {kind} of the plan are named {twice!r}; rename one")


def _check_dtype(spec: TensorSpec) -> None:
    try:
        spec.size_bytes  # noqa: B018  (refuses a dtype that numpy does not know)
    except TypeError:
        raise PlanError(f"the input {spec.name!r} has the dtype {spec.dtype!r}, which numpy does not know") from None


def _check_stage(stage: Stage) -> None:
    layer = first_repeated(stage.layers)
    if layer is not None:
        raise PlanError(f"layer {layer!r} is in {stage.name} twice; leave it once")
    twice = first_repeated(stage.machines)
    if twice is not None:
        kind = "shards" if stage.sharding else "replicas"
        raise PlanError(f"{stage.name} has two {kind} on {twice!r}; each must be on a machine of its own")
    if not stage.machines or len(stage.shares) != len(stage.machines):
        raise PlanError(
            f"{stage.name} has {len(stage.machines)} machines and {len(stage.shares)} shares; give one each"
        )
    if stage.sharding and len(stage.machines) < 2:
        raise PlanError(f"{stage.name} has a sharding and one machine; give at least two, or leave it out")
    if stage.sharding and abs(sum(stage.shares) - 1) > SHARES_TOLERANCE:
        raise PlanError(
            f"the shares of {stage.name}, which its machines compute together, add up to {sum(stage.shares):g}; "
            "make them 1"
        )
    try:
        stage.replica_schedule  # noqa: B018  (refuses shares that no schedule has)
    except ValueError as error:
        raise PlanError(f"{stage.name} on {short_list(list(map(repr, stage.machines)))}: {error}") from None


def _digest(plan: Plan) -> str:
    """The SHA-256 digest of the parts of a plan that a prediction depends on: stages, codecs and precision."""
    content = content_of(plan)
    about = [content.get(name) for name in ("stages", "codecs", "precision")]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
