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
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from tvm_split.cluster.yaml_lines import line_of
from tvm_split.errors import PlanError
from tvm_split.planner.problem import Problem, Solution, Stage
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


_PROBLEM = TypeAdapter(Problem)


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
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
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
        "loads": [{**asdict(load), "memory_bytes": load.memory_bytes} for load in evaluation.loads],
        "alternatives": [
            {**asdict(other), "stages": [_stage(problem, stage) for stage in other.stages]}
            for other in solution.alternatives
        ],
    }


def _stage(problem: Problem, stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": stage.machine, "pieces": list(stage.layers)}
    if problem.replicas:
        found |= {"machines": list(stage.machines), "shares": list(stage.shares)}
    return found


def _problem(file: _ProblemFile) -> Problem:
    content = file.model_dump(exclude_none=True)
    pins = [{"piece": pin.piece, "machine": pin.on or pin.not_on, "forbidden": pin.on is None} for pin in file.pins]
    return _PROBLEM.validate_python({**content, "pins": pins})


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """The content of a problem file, without what is infinite or not given."""
    content: dict[str, Any] = _finite(asdict(problem))
    for each in content["links"]:
        # JSON has no infinity; this many bytes a second take no time that anything here measures.
        each.setdefault("bytes_per_second", 1e18)
    for each in (*content["links"], *content["edges"]):
        each["from"], each["to"] = each.pop("source"), each.pop("destination")
    for each in content["pins"]:
        each["not_on" if each.pop("forbidden") else "on"] = each.pop("machine")
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items() if each is not None and each != math.inf}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"the key {key!r} is there twice in one object; give it once")
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
