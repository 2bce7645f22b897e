"""A planning problem as a file, and its solution as an answer: JSON, for replaying profiles and for what-if questions.

    {"objective": "throughput", "replicas": false,
     "machines": [{"name": "machine-0", "memory_bytes": 4e9}],
     "links":    [{"from": "machine-0", "to": "machine-1", "bytes_per_second": 1.25e8, "latency_seconds": 0.001}],
     "pieces":   [{"name": "layer-0", "seconds": {"machine-0": 0.01, "machine-1": 0.02}, "weight_bytes": 4000}],
     "edges":    [{"from": "layer-0", "to": "layer-1", "bytes": 4000}]}

All else may be left out: what else a machine, piece, edge or the problem can say is in `tvm_split.planner.problem`
under the same names, such as ``"pins": [{"piece": "layer-0", "on": "machine-0"}]``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tvm_split.cluster.yaml_lines import line_of
from tvm_split.errors import PlanError
from tvm_split.planner.plan import FORMAT as PLAN_FORMAT
from tvm_split.planner.problem import Problem, Solution, Stage
from tvm_split.planner.search.faults import faults
from tvm_split.units import MOST_AMOUNT, few_lines

WORDS = {"unexpected_keyword_argument": "there is no such key"}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is twelve times as fast, where it was built."""
MOST_WITH_LINES = 20_000_000
"""Characters of a file whose lines are looked for; of longer ones the place is said without."""
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
        content = json.loads(text, object_pairs_hook=_given)
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: this is no JSON: {error.msg} (column {error.colno})") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: this is no JSON: {error}") from error
    other = _other_file(content)
    if other:
        raise PlanError(f"{path} is {other}, and no planning problem, as `tvm-split plan --write-problem` writes one")
    try:
        problem = _PROBLEM.validate_json(json.dumps(content) if "null" in text else text)
    except ValidationError as error:
        found = [(each["loc"], WORDS.get(each["type"], each["msg"])) for each in error.errors()]
        raise PlanError(_with_lines(path, text, found)) from error
    wrong = [(fault.location, fault.text) for fault in faults(problem)]
    if wrong:
        raise PlanError(_with_lines(path, text, wrong))
    return problem


def _other_file(content: Any) -> str:
    """What a file is that is none of a problem, where it says so; empty where that is not known."""
    if not isinstance(content, dict) or "pieces" in content:
        return ""
    if content.get("format") == PLAN_FORMAT:
        return "a plan"
    return "an answer of `tvm-split solve --json`" if {"stages", "predicted"} <= content.keys() else ""


def read_solution_file(path: Path) -> tuple[Stage, ...]:
    """The stages in a file that has what `solution_to_dict` gave.

    Raises:
        PlanError: it cannot be read, or is no such answer.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no answer of `tvm-split solve --json`: {error}") from error
    if isinstance(content, dict) and content.get("format") == PLAN_FORMAT:
        raise PlanError(f"{path} is a plan, and no answer of `tvm-split solve --json`, which a problem belongs to")
    try:
        return tuple(each.stage() for each in _Answer.model_validate(content).stages)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise PlanError(f"{path} is no answer of `tvm-split solve --json`: {where}: {first['msg']}") from error


class _AnsweredStage(BaseModel):
    machine: str
    machines: list[str] = Field(default=[], description="of replicas, the first too")
    shares: list[Annotated[float, Field(gt=0, le=MOST_AMOUNT, allow_inf_nan=False)]] = [1.0]
    pieces: list[str] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_a_share_for_each(self) -> Self:
        machines = len(self.machines) or 1
        if machines != len(self.shares):
            raise PydanticCustomError(
                "shares", f"{len(self.shares)} shares for {machines} of machines; give one for each"
            )
        return self

    def stage(self) -> Stage:
        return Stage(tuple(self.machines) or (self.machine,), tuple(self.pieces), tuple(self.shares))


class _Answer(BaseModel):
    stages: list[_AnsweredStage] = Field(min_length=1)


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
        "shared_cores": [asdict(each) for each in evaluation.shared_cores],
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


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """The content of a problem file, without what is infinite or not given."""
    content: dict[str, Any] = _finite(_PROBLEM.dump_python(problem, by_alias=True))
    for each in content["links"]:
        # JSON has no infinity; this many bytes a second take no time that anything here measures.
        each.setdefault("bytes_per_second", 1e18)
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items() if each is not None and each != math.inf}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of distinct keys, without those that have nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise PlanError(f"the key {twice!r} is there twice in one object; give it once")
    return {key: value for key, value in pairs if value is not None} if None in found.values() else found


def _with_lines(path: Path, text: str, wrong: Sequence[tuple[tuple[int | str, ...], str]]) -> str:
    try:
        if len(text) > MOST_WITH_LINES:
            raise yaml.YAMLError
        # Tabs between tokens are JSON, but not YAML; inside strings JSON has none.
        tree = yaml.compose(text.replace("\t", " "), Loader=LOADER)
        lines = (f"{path}:{line_of(tree, location)}: {_dotted(location)}: {message}" for location, message in wrong)
    except (yaml.YAMLError, RecursionError):
        lines = (f"{path}: {_dotted(location)}: {message}" for location, message in wrong)
    return few_lines(lines, len(wrong))


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "file"
