"""``tvm-split replan``: improve a plan with the measurements of its run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import tvm_split
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import HIDDEN, WrongUseError, wrong_use
from tvm_split.cli.plan_output import PlanOutput
from tvm_split.cli.source import ModelOptions
from tvm_split.deployment.deployment_report import read_measured
from tvm_split.display.console import print_note
from tvm_split.errors import PlanError
from tvm_split.planner.request import SPLITTING, PlanRequest, RequestError


def replan(
    model: options.ModelArgument,
    plan: Annotated[Path, typer.Option(dir_okay=False, help="The plan that has run.", show_default=False)],
    measured: Annotated[
        Path, typer.Option(metavar="REPORT", dir_okay=False, help="Of `tvm-split bench --json`.", show_default=False)
    ],
    machines: MachineOptions,
    shapes: ModelOptions,
    request: Annotated[PlanRequest, HIDDEN],
    shown: PlanOutput,
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="The least gain that changes the plan.")] = 0.05,
) -> None:
    """Improve a plan with the measurements of its run, if that gains enough or if the plan breaks its constraints.

    The planning options of the plan apply again; options given here override them.

    Example: tvm-split replan net.onnx --plan plan.json --measured report.json --cluster lab.yaml
    """
    shown.require_possible(model)
    _require_searchable(request)
    cluster = machines.machines()
    current = _read_plan(plan, measured)
    loaded = shapes.load(model, current.inputs)
    new_request = replace(current.request.searched(refresh=False), **request.given)
    measurements = read_measured(measured, current.model)
    better, change = tvm_split.replan(loaded, cluster, current, measurements, threshold, new_request)
    if not change.changed:
        print_note(f"the plan stays: another gains {change.gain:.1%}, no more than {threshold:.1%}")
    elif change.gain > threshold:
        print_note(f"the plan changes: it gains {change.gain:.1%}, more than the threshold of {threshold:.1%}")
    else:
        print_note(f"the plan changes: the old one does not keep to what is demanded (gain: {change.gain:.1%})")
    shown.show(model, loaded, better, len(cluster.machines))


def _require_searchable(request: PlanRequest) -> None:
    try:
        request.require_default("new measurements need no correction; use `tvm-split plan`", ["refresh"])
        request.require_default("a plan that has run is improved by searching", SPLITTING)
        request.require_default("it is that of the plan; use `tvm-split plan` for another one", ["precision"])
    except RequestError as error:
        raise wrong_use(PlanRequest, error) from error


def _read_plan(plan: Path, measured: Path) -> tvm_split.Plan:
    """Return the plan; raise a `WrongUseError` if the two files were swapped."""
    try:
        return tvm_split.Plan.load(plan)
    except PlanError:
        with suppress(PlanError):
            tvm_split.Plan.load(measured)
            text = f"{measured} is the plan, and {plan} is none; give --plan {measured} --measured {plan}"
            raise WrongUseError(text, "--plan, --measured") from None
        raise
