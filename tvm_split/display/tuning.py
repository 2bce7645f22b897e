"""The view of a tuning report."""

import dataclasses
from typing import Any

from rich.text import Text

from schedules.tuning.tuner import KernelResult
from tvm_split.display.view import Row, Table, View, as_json, view
from tvm_split.tuning import TuningReport
from tvm_split.units import count_text, seconds_text


@as_json.register
def tuning_as_json(report: TuningReport) -> dict[str, Any]:
    """Return the tuning report with its totals and the gain of each kernel, as JSON values."""
    return {
        **dataclasses.asdict(report),
        "database": str(report.database),
        "default_seconds": report.default_seconds,
        "tuned_seconds": report.tuned_seconds,
        "kernels": [{**dataclasses.asdict(kernel), "gain": kernel.gain} for kernel in report.kernels],
    }


@view.register
def view_of_tuning(report: TuningReport, *, details: bool = False) -> View:
    """Return a table with a row for each kernel, and their total time."""
    numbers = ("calls", "share", "default", "tuned", "gain", "trials")
    rows = list(map(_kernel_row, report.kernels))
    if report.fixed_seconds:
        share = report.fixed_seconds / report.default_seconds
        rows.append(("kernels without choices, all calls", "", f"{share:.1%}", _time(report.fixed_seconds), "", "", ""))
    unmeasured = (
        f", without {count_text(report.unmeasured, 'kernel')} that could not be measured" if report.unmeasured else ""
    )
    return [
        Table(f"{report.model}: kernels", ("kernel, template, choices",), numbers, rows),
        f"all of them, one run of the model: {report.default_seconds * 1e3:.3f} ms by default, "
        f"{report.tuned_seconds * 1e3:.3f} ms tuned{unmeasured}; records are in {report.database}",
    ]


def _kernel_row(kernel: KernelResult) -> Row:
    return (
        Text(f"{kernel.name}\n  ").append(f"{kernel.template}: {kernel.choices}", "dim"),
        str(kernel.count),
        f"{kernel.share:.1%}",
        _time(kernel.default_seconds),
        _time(kernel.tuned_seconds) if kernel.kept else "default",
        f"{kernel.gain:.2f}" if kernel.kept else "",
        f"{kernel.trials}" + (f" ({kernel.failures} failed)" if kernel.failures else ""),
    )


def _time(seconds: float | None) -> str:
    return "failed" if seconds is None else seconds_text(seconds)
