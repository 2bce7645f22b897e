"""``tvm-split replan``: improve a plan by what it was measured to do."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_split.cli import options
from tvm_split.cli.console import print_note
from tvm_split.cli.model_source import ModelOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.plan_output import PlanOutput
from tvm_split.cli.planning import SPLITTING, ClusterOptions, PlanOptions

if TYPE_CHECKING:
    from tvm_split.planner.plan import Plan


def replan(
    model: options.ModelArgument,
    plan: Annotated[Path, typer.Option(dir_okay=False, help="The plan that has run.", show_default=False)],
    measured: Annotated[
        Path, typer.Option(metavar="REPORT", dir_okay=False, help="Of `tvm-split bench --json`.", show_default=False)
    ],
    cluster: ClusterOptions,
    shapes: ModelOptions,
    request: PlanOptions,
    shown: PlanOutput,
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="The least gain that changes the plan.")] = 0.05,
) -> None:
    """Improve a plan that has run by what was measured of it, and change it only where that gains enough."""
    from tvm_split.deployment.measured_file import read_measured
    from tvm_split.planning import plan_again

    shown.require_possible(model)
    request.require_none("new measurements need no correction; use `tvm-split plan`", ("refresh",))
    request.require_none("a plan that has run is improved by searching", SPLITTING)
    request.require_none("it is that of the plan; use `tvm-split plan` for another one", ("precision",))
    machines = cluster.machines()
    current = _read_plan(plan, measured)
    loaded = shapes.load(model)
    found = read_measured(measured, loaded.name)
    asked = request.request(model, loaded, machines)
    better, change = plan_again(loaded, machines, asked, current, found, threshold)
    if not change.changed:
        print_note(f"the plan stays: another gains {change.gain:.1%}, no more than {threshold:.1%}")
    elif change.gain > threshold:
        print_note(f"the plan changes: it gains {change.gain:.1%}, more than the threshold of {threshold:.1%}")
    else:
        print_note(f"the plan changes: the old one does not keep to what is demanded (gain: {change.gain:.1%})")
    shown.show(model, loaded, better, len(machines.machines))


def _read_plan(plan: Path, measured: Path) -> Plan:
    """The plan; a `WrongUseError` where the two files were taken for each other."""
    from tvm_split.errors import PlanError
    from tvm_split.planner.plan import Plan

    try:
        return Plan.load(plan)
    except PlanError:
        with suppress(PlanError):
            Plan.load(measured)
            text = f"{measured} is the plan, and {plan} is none; give --plan {measured} --measured {plan}"
            raise WrongUseError(text, "--plan, --measured") from None
        raise
