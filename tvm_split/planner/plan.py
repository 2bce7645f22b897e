"""A plan: stages, the machines that run them and the layers they hold. Also as a file that people read and edit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rpc_runtime.program.turns import cycle_of
from tvm_split.cluster.shared_cores import MOST_CORES
from tvm_split.errors import PlanError
from tvm_split.planner.codec_choice import PlannedCodec
from tvm_split.planner.prediction import Prediction
from tvm_split.planner.problem import SHARES_TOLERANCE, Axis, Exchange, Precision, Sharding, Stage
from tvm_split.units import MOST_AMOUNT, few_lines, short_list

FORMAT = "tvm-split plan"
VERSION = 2
LONGEST_SHOWN = 60
"""Characters of a value that a message says."""


@dataclass(frozen=True)
class PlannedMachine:
    """A machine as a stage is compiled for it: its name, TVM target (as a dictionary) and threads.

    ``address`` is where its worker listened when the plan was made; None for the workers of a local cluster.
    """

    name: str
    target: Mapping[str, Any]
    threads: Annotated[int, Field(ge=1, le=MOST_CORES)]
    address: str | None = None


@dataclass(frozen=True)
class Plan:
    """Stages in topological order; every layer of the model is in exactly one.

    ``origin`` says in a few words how the plan was found. ``prediction`` is what the planner expects of exactly these
    stages and codecs; it is None for a plan that was made or changed by hand. ``codecs`` are those of the tensors that
    have one on a link; ``remarks`` say which codecs were asked for and do nothing, and what stays in float32 although
    convolutions and products take their operands in ``precision``.

    Raises:
        PlanError: the replicas of a stage, or those of all stages together, cannot take turns, or two replicas or
            shards of a stage are on one machine; names the stage.
    """

    model: str
    objective: str
    origin: str
    machines: tuple[PlannedMachine, ...]
    stages: tuple[Stage, ...]
    prediction: Prediction | None = None
    codecs: tuple[PlannedCodec, ...] = ()
    remarks: tuple[str, ...] = ()
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        for stage in self.stages:
            twice = next((name for name in stage.machines if stage.machines.count(name) > 1), None)
            if twice is not None:
                kind = "shards" if stage.sharding else "replicas"
                raise PlanError(f"{stage.name} has two {kind} on {twice!r}; each must be on a machine of its own")
            try:
                stage.turns  # noqa: B018  (refuses shares of which there are no turns)
            except ValueError as error:
                raise PlanError(f"{stage.name} on {short_list(list(map(repr, stage.machines)))}: {error}") from None
        try:
            cycle_of(len(stage.turns) for stage in self.stages)
        except ValueError as error:
            lengths = ", ".join(f"{stage.name} {len(stage.turns)}" for stage in self.stages if len(stage.turns) > 1)
            raise PlanError(f"of {lengths} turns: {error}") from None

    def machine(self, name: str) -> PlannedMachine:
        for machine in self.machines:
            if machine.name == name:
                return machine
        raise PlanError(f"the plan names no machine {name!r}; it has {short_list([m.name for m in self.machines])}")

    @property
    def in_flight(self) -> int | None:
        """How many micro-batches of a stream are under way at most, where the plan says: for latency, if measured."""
        if self.objective == "throughput" or self.prediction is None or self.prediction.profiled_at == 0:
            return None
        return self.prediction.in_flight

    def machines_by_target(self, stage: Stage) -> list[list[str]]:
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
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["machines"] = [
            {name: value for name, value in each.items() if value is not None} for each in content["machines"]
        ]
        content["stages"] = [_stage_content(stage) for stage in self.stages]
        if self.prediction is None:
            del content["prediction"]
        else:
            digest = _digest(self.stages, self.codecs, self.precision)
            content["prediction"] = {"for_stages": digest, **content["prediction"]}
        for name, usual in (("codecs", ()), ("remarks", ()), ("precision", "float32")):
            if content[name] == usual:
                del content[name]
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
        form = content.get("format") if isinstance(content, dict) else None
        if form != FORMAT:
            answer = isinstance(content, dict) and {"stages", "predicted"} <= content.keys()
            other = "; `tvm-split simulate` takes an answer of `tvm-split solve` with its --problem" if answer else ""
            raise PlanError(
                f"{source} is no plan, which `tvm-split plan --output` writes: it should say format {FORMAT!r}{other}"
            )
        if content.get("version") != VERSION:
            raise PlanError(
                f"{source} is a plan of version {content.get('version')}, and this tvm-split reads version {VERSION}; "
                "plan again"
            )
        try:
            parsed = _PlanFile.model_validate(content)
        except ValidationError as error:
            raise PlanError(_problems(error, f"{source}: ")) from error
        try:
            stages = tuple(each.stage() for each in parsed.stages)
            machines, codecs = tuple(parsed.machines), tuple(parsed.codecs)
            origin, remarks = parsed.origin, tuple(parsed.remarks)
            plan = cls(
                parsed.model,
                parsed.objective,
                origin,
                machines,
                stages,
                codecs=codecs,
                remarks=remarks,
                precision=parsed.precision,
            )
            for machine in (machine for stage in stages for machine in stage.machines):
                plan.machine(machine)
        except PlanError as error:
            raise PlanError(f"{source}: stages: {error}") from None
        prediction = parsed.prediction
        if prediction is None or prediction.pop("for_stages", None) != _digest(stages, codecs, parsed.precision):
            return plan  # someone has edited them: what was expected of the old ones says nothing
        try:
            return replace(plan, prediction=_PREDICTION.validate_python(prediction))
        except ValidationError as error:
            raise PlanError(_problems(error, f"{source}: prediction.")) from error


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Part(_Strict):
    machine: str
    share: float = Field(gt=0, le=MOST_AMOUNT, allow_inf_nan=False)


class _Shard(_Strict):
    axis: Axis
    exchange: Exchange = "fused"
    parts: list[_Part]


class _Stage(_Strict):
    name: str
    machine: str
    replicas: list[_Part] = Field(default=[], description="all machines that take turns, the first too")
    shard: _Shard | None = Field(default=None, description="how all its machines compute each micro-batch together")
    layers: list[str]

    def stage(self) -> Stage:
        if self.replicas and self.shard:
            raise PlanError(f"{self.name} has replicas and a shard; its machines can take turns or share, not both")
        parts, kind = (self.shard.parts, "shard") if self.shard else (self.replicas, "replica")
        names = tuple(each.machine for each in parts)
        if len(names) == 1 or (self.shard and not names):
            held = f"one {kind}, on {names[0]!r}" if names else f"a {kind} without parts"
            raise PlanError(f"{self.name} has {held}; give at least two, or leave it out")
        if names and names[0] != self.machine:
            raise PlanError(f"{self.name} is on {self.machine!r}, but its first {kind} is on {names[0]!r}")
        shares = tuple(each.share for each in parts)
        sharding = None
        if self.shard:
            if abs(sum(shares) - 1) > SHARES_TOLERANCE:
                raise PlanError(
                    f"the shares of {self.name}, which its machines compute together, add up to {sum(shares):g}; "
                    "make them 1"
                )
            sharding = Sharding(self.shard.axis, self.shard.exchange)
        return Stage(names or (self.machine,), tuple(self.layers), shares or (1.0,), self.name, sharding)


class _PlanFile(_Strict):
    format: str
    version: int
    model: str
    objective: str
    origin: str
    machines: list[PlannedMachine] = Field(min_length=1)
    stages: list[_Stage] = Field(min_length=1)
    codecs: list[PlannedCodec] = []
    remarks: list[str] = []
    precision: Precision = "float32"
    prediction: dict[str, Any] | None = None


_PREDICTION = TypeAdapter(Prediction)


def _stage_content(stage: Stage) -> dict[str, Any]:
    """A stage as the plan file has it: where it has several machines, with replicas or a shard."""
    parts = [{"machine": one, "share": share} for one, share in zip(stage.machines, stage.shares, strict=True)]
    several: dict[str, Any] = {"replicas": parts} if len(parts) > 1 else {}
    if stage.sharding:
        several = {"shard": {**asdict(stage.sharding), "parts": parts}}
    return {"name": stage.name, "machine": stage.machine, **several, "layers": list(stage.layers)}


def _problems(error: ValidationError, where: str) -> str:
    return few_lines(
        (f"{where}{'.'.join(map(str, each['loc']))}: {each['msg']}{_given(each)}" for each in error.errors()),
        error.error_count(),
    )


def _given(problem: ErrorDetails) -> str:
    """The value that stands there, if it is a short one."""
    value = problem["input"]
    return f" (it is {value!r})" if isinstance(value, str | int | float) and len(repr(value)) < LONGEST_SHOWN else ""


def _digest(stages: Sequence[Stage], codecs: Sequence[PlannedCodec], precision: Precision) -> str:
    content: list[Any] = [_stage_content(stage) for stage in stages] + [asdict(codec) for codec in codecs]
    content += [precision] * (precision != "float32")
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
