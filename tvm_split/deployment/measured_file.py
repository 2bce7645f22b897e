"""What ``tvm-split bench --json`` wrote, as far as planning anew needs it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tvm_split.errors import PlanError
from tvm_split.planner.prediction import Corrections
from tvm_split.planner.replanning import Measured


class _Report(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Comparison(_Report):
    measured: float | None
    ratio: float | None


class _Machine(_Report):
    machine: str
    compute_seconds: _Comparison


class _Link(_Report):
    source: str
    destination: str
    bytes: _Comparison
    seconds: _Comparison


class _Corrections(_Report):
    compute_ratios: list[tuple[str, float]] = []
    link_speeds: list[tuple[str, str, float]] = []


class _File(_Report):
    model: str
    period_seconds: _Comparison
    machines: list[_Machine]
    links: list[_Link]
    profiled_at: float | None = None
    corrections: _Corrections = _Corrections()


def read_measured(path: Path, model: str) -> Measured:
    """Measurements of a model's plan; machines and links of which nothing was predicted or measured are left out.

    Raises:
        PlanError: the file cannot be read, is no report, or one of another model or without a prediction.
    """
    try:
        report = _File.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise PlanError(f"{path} is no report of `tvm-split bench --json`: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no report of `tvm-split bench --json`: {error}") from error
    if report.model != model:
        raise PlanError(f"{path} is of model {report.model!r}, the model is {model!r}")
    compared = {each.machine: each.compute_seconds for each in report.machines}
    ratios = {machine: each.ratio for machine, each in compared.items() if each.ratio and each.measured}
    if not ratios:
        raise PlanError(
            f"{path} has nothing to compare: the plan that was measured had no prediction; make one with "
            "`tvm-split plan`, without --split"
        )
    return Measured(
        period_seconds=report.period_seconds.measured or 0.0,
        compute_ratios=ratios,
        transfers={
            (each.source, each.destination): (each.bytes.measured, each.seconds.measured)
            for each in report.links
            if each.bytes.measured and each.seconds.measured
        },
        earlier=Corrections(tuple(report.corrections.compute_ratios), tuple(report.corrections.link_speeds)),
        profiled_at=report.profiled_at,
    )
