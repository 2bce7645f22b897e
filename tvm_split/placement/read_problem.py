"""Planning problems and their solutions as JSON files, for replaying profiles and for what-if questions.

The fields are those of the classes in `tvm_split.placement.problem`; docs/planner.md has an example.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tvm_split.errors import PlanError, required
from tvm_split.placement.plan import FORMAT as PLAN_FORMAT
from tvm_split.placement.problem import Problem, Share, Stage, faults
from tvm_split.placement.solution import Solution
from tvm_split.values import Document, content_of

FASTEST = 1e18
"""Bytes per second that a file gives for a link without a limit: JSON has no infinity."""


def read_problem_file(path: Path) -> Problem:
    """The problem in a JSON file; a null value counts as a missing field.

    Raises:
        PlanError: the file cannot be read, is no JSON, or has an invalid value; names the file, the line, and the
            expected value.
    """
    document = Document.read(path, PlanError, without_nulls=True)
    kind = _other_file(document.content)
    if kind:
        raise PlanError(f"{path} is {kind}, and no planning problem, as `tvm-split plan --write-problem` writes one")
    problem = document.value(Problem)
    if wrong := [(fault.location, fault.text) for fault in faults(problem)]:
        raise document.complaint(wrong)
    return problem


def as_problem(value: Any) -> Problem:
    """Return a problem, or the one in a file. Raises PlanError."""
    if isinstance(value, str | Path):
        return read_problem_file(Path(value))
    return required(Problem, value, PlanError, "give a Problem, or a file of `tvm-split plan --write-problem`")


def _other_file(content: Any) -> str:
    """Return what kind of file a file without a problem is, such as "a plan"; empty if unknown."""
    if not isinstance(content, dict) or "pieces" in content:
        return ""
    if content.get("format") == PLAN_FORMAT:
        return "a plan"
    return "an answer of `tvm-split solve --json`" if {"stages", "predicted"} <= content.keys() else ""


@dataclass(frozen=True)
class _AnsweredStage:
    machine: str
    pieces: Annotated[tuple[str, ...], Field(min_length=1)]
    machines: tuple[str, ...] = ()
    shares: tuple[Share, ...] = (1.0,)

    def __post_init__(self) -> None:
        machines = len(self.machines) or 1
        if machines != len(self.shares):
            raise ValueError(f"{len(self.shares)} shares for {machines} of machines; give one for each")


@dataclass(frozen=True)
class _Answer:
    stages: Annotated[tuple[_AnsweredStage, ...], Field(min_length=1)]


def read_solution_file(path: Path) -> tuple[Stage, ...]:
    """The stages in a file that holds a result of `solution_to_dict`.

    Raises:
        PlanError: the file cannot be read, or holds no such result.
    """
    document = Document.read(path, PlanError)
    if isinstance(document.content, dict) and document.content.get("format") == PLAN_FORMAT:
        raise PlanError(f"{path} is a plan, and no answer of `tvm-split solve --json`, which a problem belongs to")
    try:
        answer = document.value(_Answer)
    except PlanError as error:
        raise PlanError(f"{path} is no answer of `tvm-split solve --json`: {error}") from error
    return tuple(Stage(stage.machines or (stage.machine,), stage.pieces, stage.shares) for stage in answer.stages)


def solution_to_dict(problem: Problem, solution: Solution) -> dict[str, Any]:
    """Return a solution as values for JSON: stages of pieces, prediction, lower bound, gap, loads and alternatives.

    Times are in seconds. ``machines`` and ``shares`` of a stage are there if ``problem`` allows replicas.
    """
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
        "shared_cores": [asdict(shared) for shared in evaluation.shared_cores],
        "alternatives": [
            {
                "name": alternative.name,
                "stages": [_stage(problem, stage) for stage in alternative.stages],
                "period_seconds": alternative.period_seconds,
                "latency_seconds": alternative.latency_seconds,
                "why": alternative.why,
            }
            for alternative in solution.alternatives
        ],
    }


def _stage(problem: Problem, stage: Stage) -> dict[str, Any]:
    content: dict[str, Any] = {"machine": stage.machine, "pieces": list(stage.layers)}
    if problem.replicas:
        content |= {"machines": list(stage.machines), "shares": list(stage.shares)}
    return content


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """The content of a problem file, without fields that have their default values."""
    content = content_of(problem)
    for link in content["links"]:
        if math.isinf(link["bytes_per_second"]):
            link["bytes_per_second"] = FASTEST
    return content
