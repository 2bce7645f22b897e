"""Read a report of ``tvm-split bench --json``, as far as replanning and simulation need it."""

from __future__ import annotations

from pathlib import Path

from tvm_split.deployment.deployment_report import DeploymentReport
from tvm_split.deployment.report_advice import changed_links
from tvm_split.errors import PlanError
from tvm_split.planner.replan import Measured
from tvm_split.values import read


def read_computing(path: Path, model: str) -> dict[str, float]:
    """Measured seconds of computing by machine, per micro-batch of a stream; raises a `PlanError` for a wrong file."""
    report = _read_report(path, model)
    return {each.machine: each.compute.measured for each in report.machines if each.compute.measured is not None}


def read_measured(path: Path, model: str) -> Measured:
    """Measurements of a model's plan: of machines that have a prediction, and of links that have changed.

    Raises:
        PlanError: the file cannot be read, is no report, or is a report of another model or without a prediction.
    """
    report = _read_report(path, model)
    compared = {each.machine: 1.0 if each.compute.inconclusive else each.compute.ratio for each in report.machines}
    ratios = {machine: ratio for machine, ratio in compared.items() if ratio}
    if not ratios:
        raise PlanError(
            f"{path} has nothing to compare: the plan that was measured had no prediction; make one with "
            "`tvm-split plan`, of a split by hand with --predict"
        )
    return Measured(
        compute_ratios=ratios,
        link_speeds={
            (each.source, each.destination): each.bytes.measured / each.seconds.measured
            for each in changed_links(report.period, report.latency, report.links)
            if each.bytes.measured and each.seconds.measured
        },
        earlier=report.corrections,
        profiled_at=report.profiled_at,
    )


def _read_report(path: Path, model: str) -> DeploymentReport:
    try:
        report = read(DeploymentReport, path, PlanError)
    except PlanError as error:
        raise PlanError(f"{path} is no report, which `tvm-split bench --json` writes: {error}") from error
    if report.model != model:
        raise PlanError(f"{path} is of model {report.model!r}, the model is {model!r}")
    return report
