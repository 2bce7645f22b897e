"""A plan: stages, the machines that run them and the layers they hold. Also as a file that people read and edit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tvm_split.errors import PlanError
from tvm_split.planner.prediction import Prediction
from tvm_split.rpc_runtime.program.turns import deal

FORMAT = "tvm-split plan"
VERSION = 1


@dataclass(frozen=True)
class PlannedMachine:
    """A machine as a stage is compiled for it: its name, TVM target (as a dictionary) and threads.

    ``address`` is where its worker listened when the plan was made; None for the workers of a local cluster.
    """

    name: str
    target: Mapping[str, Any]
    threads: int
    address: str | None = None


@dataclass(frozen=True)
class PlannedReplica:
    """One of the machines that take turns at a stage. ``share`` of the micro-batches, in proportion to the others'."""

    machine: str
    share: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage: the machine that runs it and its layers, in the order of execution.

    Where several machines take turns, ``replicas`` are all of them, and ``machine`` is the first.

    Raises:
        PlanError: the replicas cannot take turns; names the stage.
    """

    name: str
    machine: str
    layers: tuple[str, ...]
    replicas: tuple[PlannedReplica, ...] = ()

    def __post_init__(self) -> None:
        names = [replica.machine for replica in self.replicas]
        if len(names) == 1:
            raise PlanError(f"{self.name} has one replica, on {names[0]!r}; give at least two, or leave replicas out")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PlanError(f"{self.name} has two replicas on {twice!r}; each must be on a machine of its own")
        if names and names[0] != self.machine:
            raise PlanError(f"{self.name} is on {self.machine!r}, but its first replica is on {names[0]!r}")
        try:
            self.turns  # noqa: B018  (refuses shares that cannot be dealt)
        except ValueError as error:
            raise PlanError(f"{self.name} on {', '.join(map(repr, names))}: {error}") from None

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(replica.machine for replica in self.replicas) or (self.machine,)

    @property
    def turns(self) -> tuple[int, ...]:
        """Micro-batch ``s`` is computed on ``machines[turns[s % len(turns)]]``."""
        return deal([replica.share for replica in self.replicas]) if self.replicas else (0,)


@dataclass(frozen=True)
class Plan:
    """Stages in topological order; every layer of the model is in exactly one.

    ``origin`` says in a few words how the plan was found. ``prediction`` is what the planner expects of exactly these
    stages; it is None for a plan that was made or changed by hand.
    """

    model: str
    objective: str
    origin: str
    machines: tuple[PlannedMachine, ...]
    stages: tuple[PlannedStage, ...]
    prediction: Prediction | None = None

    def machine(self, name: str) -> PlannedMachine:
        for machine in self.machines:
            if machine.name == name:
                return machine
        raise PlanError(f"the plan names no machine {name!r}; it has {', '.join(m.name for m in self.machines)}")

    def machines_by_target(self, stage: PlannedStage) -> list[list[str]]:
        """The machines of a stage, those of equal targets together: their replicas share a library."""
        groups: list[list[str]] = []
        for machine in stage.machines:
            target = self.machine(machine).target
            known = next((group for group in groups if self.machine(group[0]).target == target), None)
            if known is None:
                groups.append([machine])
            else:
                known.append(machine)
        return groups

    def to_dict(self) -> dict[str, Any]:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "objective": self.objective,
            "origin": self.origin,
            "machines": [
                {name: value for name, value in asdict(machine).items() if value is not None}
                for machine in self.machines
            ],
            "stages": [_stage_content(stage) for stage in self.stages],
        }
        if self.prediction is not None:
            content["prediction"] = {"for_stages": _stages_digest(self.stages), **asdict(self.prediction)}
        return content

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; a `PlanError` says what does not fit where."""
        try:
            content = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is no JSON: {error}") from error
        return cls.from_dict(content, source=str(path))

    @classmethod
    def from_dict(cls, content: Any, source: str = "plan") -> Plan:
        try:
            parsed = _PlanFile.model_validate(content)
        except ValidationError as error:
            problems = [f"{source}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise PlanError("\n".join(problems)) from error
        if (parsed.format, parsed.version) != (FORMAT, VERSION):
            raise PlanError(
                f"{source} is a {parsed.format!r} of version {parsed.version}; this version reads {FORMAT!r} {VERSION}"
            )
        machines = tuple(PlannedMachine(**dict(each)) for each in parsed.machines)
        try:
            stages = tuple(each.stage() for each in parsed.stages)
        except PlanError as error:
            raise PlanError(f"{source}: stages: {error}") from None
        prediction = parsed.prediction
        if prediction is not None and prediction.pop("for_stages", None) != _stages_digest(stages):
            prediction = None  # someone has edited the stages: what was expected of the old ones says nothing
        try:
            predicted = None if prediction is None else _PREDICTION.validate_python(prediction)
        except ValidationError as error:
            problems = [f"{source}: prediction.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise PlanError("\n".join(problems)) from error
        result = cls(parsed.model, parsed.objective, parsed.origin, machines, stages, predicted)
        for machine in (machine for stage in stages for machine in stage.machines):
            result.machine(machine)
        return result


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _PlannedMachine(_Strict):
    name: str
    target: dict[str, Any]
    threads: int = Field(ge=1)
    address: str | None = None


class _PlannedReplica(_Strict):
    machine: str
    share: float = Field(gt=0, allow_inf_nan=False)


class _PlannedStage(_Strict):
    name: str
    machine: str
    replicas: list[_PlannedReplica] = Field(default=[], description="all machines that take turns, the first too")
    layers: list[str]

    def stage(self) -> PlannedStage:
        replicas = tuple(PlannedReplica(each.machine, each.share) for each in self.replicas)
        return PlannedStage(self.name, self.machine, tuple(self.layers), replicas)


class _PlanFile(_Strict):
    format: str
    version: int
    model: str
    objective: str
    origin: str
    machines: list[_PlannedMachine] = Field(min_length=1)
    stages: list[_PlannedStage] = Field(min_length=1)
    prediction: dict[str, Any] | None = None


_PREDICTION = TypeAdapter(Prediction)


def _stage_content(stage: PlannedStage) -> dict[str, Any]:
    """A stage as the plan file has it: without replicas, where there is one machine."""
    replicas = {"replicas": [asdict(replica) for replica in stage.replicas]} if stage.replicas else {}
    return {"name": stage.name, "machine": stage.machine, **replicas, "layers": list(stage.layers)}


def _stages_digest(stages: Sequence[PlannedStage]) -> str:
    content = [_stage_content(stage) for stage in stages]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
