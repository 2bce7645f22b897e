"""A planning problem as a file, and its solution as an answer: JSON, for replaying profiles and for what-if questions.

    {"objective": "throughput", "replicas": false,
     "machines": [{"name": "machine-0", "memory_bytes": 4e9}],
     "links":    [{"from": "machine-0", "to": "machine-1", "bytes_per_second": 1.25e8, "latency_seconds": 0.001}],
     "pieces":   [{"name": "layer-0", "seconds": {"machine-0": 0.01, "machine-1": 0.02}, "weight_bytes": 4000}],
     "edges":    [{"from": "layer-0", "to": "layer-1", "bytes": 4000}]}

All else may be left out: what else a machine, piece, edge or the problem can say is in `tvm_split.planner.problem`
under the same names, and ``"pins": [{"piece": "layer-0", "on": "machine-0"}, {"piece": "layer-1", "not_on": …}]``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tvm_split.cluster.yaml_lines import line_of
from tvm_split.errors import PlanError
from tvm_split.planner.problem import (
    Edge,
    Piece,
    Pin,
    Problem,
    ProblemLink,
    ProblemMachine,
    Solution,
    SolvedStage,
)
from tvm_split.planner.search.faults import faults

NotNegative = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=False)


class _Machine(_Strict):
    name: Name
    memory_bytes: NotNegative | None = None
    transfer_seconds: NotNegative = 0.0
    transfer_seconds_per_byte: NotNegative = 0.0
    contention: Annotated[float, Field(gt=0)] = 1.0
    alone_contention: Annotated[float, Field(gt=0)] = 1.0
    alone_transfer_seconds: NotNegative | None = None


class _Link(_Strict):
    source: Name = Field(alias="from")
    destination: Name = Field(alias="to")
    bytes_per_second: Annotated[float, Field(gt=0)]
    latency_seconds: NotNegative = 0.0


class _Piece(_Strict):
    name: Name
    seconds: dict[str, NotNegative]
    weight_bytes: NotNegative = 0.0
    activation_bytes: NotNegative = 0.0


class _Edge(_Strict):
    source: Name = Field(alias="from")
    destination: Name = Field(alias="to")
    bytes: NotNegative
    tensor: str | None = None


class _Pin(_Strict):
    piece: Name
    on: str | None = None
    not_on: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> _Pin:
        if (self.on is None) == (self.not_on is None):
            raise ValueError('a pin has either "on" or "not_on"')
        return self


class _ProblemFile(_Strict):
    objective: Literal["throughput", "latency"]
    machines: list[_Machine]
    pieces: list[_Piece]
    links: list[_Link] = []
    edges: list[_Edge] = []
    replicas: bool = False
    pins: list[_Pin] = []
    maximum_machines: Annotated[int, Field(ge=1)] | None = None
    stages: Annotated[int, Field(ge=1)] | None = None
    maximum_period_seconds: NotNegative | None = None
    maximum_latency_seconds: NotNegative | None = None
    buffers: Annotated[int, Field(ge=0)] = 0


def read_problem_file(path: Path) -> Problem:
    """The problem in a JSON file.

    Raises:
        PlanError: it cannot be read, is no JSON, or says what cannot be: with the file, the line, and what is expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the problem file {path}: {error}") from error
    try:
        content = json.loads(text, object_pairs_hook=_distinct_keys)
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: this is no JSON: {error.msg} (column {error.colno})") from error
    except _DoubledKeyError as error:
        raise PlanError(f"{path}: the key {error.key!r} is there twice in one object; give it once") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: this is no JSON: {error}") from error
    try:
        problem = _problem(_ProblemFile.model_validate(content))
    except ValidationError as error:
        found = [(problem["loc"], problem["msg"]) for problem in error.errors()]
        raise PlanError(_with_lines(path, text, found)) from error
    wrong = [(fault.location, fault.text) for fault in faults(problem)]
    if wrong:
        raise PlanError(_with_lines(path, text, wrong))
    return problem


def solution_to_dict(problem: Problem, solution: Solution) -> dict[str, Any]:
    """The answer: stages, prediction and certificate, as JSON can hold it."""
    evaluation = solution.evaluation
    return {
        "stages": [_stage(problem, stage) for stage in solution.stages],
        "predicted": {
            "period_seconds": evaluation.period_seconds,
            "latency_seconds": evaluation.latency_seconds,
        },
        "lower_bound_seconds": solution.lower_bound_seconds,
        "gap": solution.gap,
        "limiting": evaluation.limiting,
        "objective": problem.objective,
        "method": solution.method,
        "why_no_more_machines": solution.why_no_more_machines,
        "loads": [
            {
                "machine": load.machine,
                "compute_seconds": load.compute_seconds,
                "receive_seconds": load.receive_seconds,
                "send_seconds": load.send_seconds,
                "bytes_received": load.bytes_received,
                "bytes_sent": load.bytes_sent,
                "weight_bytes": load.weight_bytes,
                "activation_bytes": load.activation_bytes,
                "buffer_bytes": load.buffer_bytes,
                "memory_bytes": load.memory_bytes,
            }
            for load in evaluation.loads
        ],
        "alternatives": [
            {
                "name": other.name,
                "stages": [_stage(problem, stage) for stage in other.stages],
                "period_seconds": other.period_seconds,
                "latency_seconds": other.latency_seconds,
                "why": other.why,
            }
            for other in solution.alternatives
        ],
    }


def _stage(problem: Problem, stage: SolvedStage) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": stage.machines[0], "pieces": list(stage.pieces)}
    if problem.replicas:
        found |= {"machines": list(stage.machines), "shares": list(stage.shares)}
    return found


def _problem(file: _ProblemFile) -> Problem:
    return Problem(
        objective=file.objective,
        machines=tuple(
            ProblemMachine(
                machine.name,
                _or_infinity(machine.memory_bytes),
                machine.transfer_seconds,
                machine.transfer_seconds_per_byte,
                machine.contention,
                machine.alone_contention,
                machine.alone_transfer_seconds,
            )
            for machine in file.machines
        ),
        links=tuple(
            ProblemLink(link.source, link.destination, link.bytes_per_second, link.latency_seconds)
            for link in file.links
        ),
        pieces=tuple(
            Piece(piece.name, piece.seconds, piece.weight_bytes, piece.activation_bytes) for piece in file.pieces
        ),
        edges=tuple(Edge(edge.source, edge.destination, edge.bytes, edge.tensor) for edge in file.edges),
        replicas=file.replicas,
        pins=tuple(Pin(pin.piece, pin.on or pin.not_on or "", pin.on is None) for pin in file.pins),
        maximum_machines=file.maximum_machines,
        stages=file.stages,
        maximum_period_seconds=_or_infinity(file.maximum_period_seconds),
        maximum_latency_seconds=_or_infinity(file.maximum_latency_seconds),
        buffers=file.buffers,
    )


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """The content of a problem file, without what has its default."""
    return {
        "objective": problem.objective,
        "replicas": problem.replicas,
        "machines": [
            {"name": each.name, **_finite("memory_bytes", each.memory_bytes)}
            | {
                "transfer_seconds": each.transfer_seconds,
                "transfer_seconds_per_byte": each.transfer_seconds_per_byte,
                "contention": each.contention,
                "alone_contention": each.alone_contention,
                "alone_transfer_seconds": each.transfer_seconds_alone,
            }
            for each in problem.machines
        ],
        "links": [
            {
                "from": each.source,
                "to": each.destination,
                # JSON has no infinity; this many bytes a second take no time that anything here measures.
                "bytes_per_second": min(each.bytes_per_second, 1e18),
                "latency_seconds": each.latency_seconds,
            }
            for each in problem.links
        ],
        "pieces": [
            {
                "name": each.name,
                "seconds": dict(each.seconds),
                "weight_bytes": each.weight_bytes,
                "activation_bytes": each.activation_bytes,
            }
            for each in problem.pieces
        ],
        "edges": [
            {"from": each.source, "to": each.destination, "bytes": each.bytes}
            | ({} if each.tensor is None else {"tensor": each.tensor})
            for each in problem.edges
        ],
        "pins": [{"piece": each.piece, "not_on" if each.forbidden else "on": each.machine} for each in problem.pins],
        **({} if problem.maximum_machines is None else {"maximum_machines": problem.maximum_machines}),
        **({} if problem.stages is None else {"stages": problem.stages}),
        **_finite("maximum_period_seconds", problem.maximum_period_seconds),
        **_finite("maximum_latency_seconds", problem.maximum_latency_seconds),
        "buffers": problem.buffers,
    }


def _finite(key: str, value: float) -> dict[str, float]:
    return {key: value} if math.isfinite(value) else {}


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value


class _DoubledKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DoubledKeyError(key)
        found[key] = value
    return found


def _with_lines(path: Path, text: str, wrong: Sequence[tuple[tuple[int | str, ...], str]]) -> str:
    try:
        # Tabs between tokens are JSON, but not YAML; inside strings JSON has none.
        tree = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return "\n".join(f"{path}: {_dotted(location)}: {message}" for location, message in wrong)
    return "\n".join(f"{path}:{line_of(tree, location)}: {_dotted(location)}: {message}" for location, message in wrong)


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "file"
