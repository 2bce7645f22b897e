"""``tvm-split profile --cluster``: what a model's pieces take on the machines of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tvm_split.cli.console import STDOUT, print_json, print_note
from tvm_split.progress import step_progress
from tvm_split.units import age_text, bytes_text

if TYPE_CHECKING:
    from pathlib import Path

    from tvm_split.cluster.cluster import Cluster
    from tvm_split.measuring.cluster_profiling import MachineReport, MeasuredCluster
    from tvm_split.model import Model
    from tvm_split.planner.profile import ClusterProfile, MachineProfile


def profile_on_cluster(
    model: Model, cluster: Cluster, *, database: Path | None, refresh: bool, timeout_seconds: float, json: bool
) -> None:
    """Measure what is not known yet, and show it all."""
    from tvm_split.measuring.model_profiling import profile_model

    with step_progress("profiling") as report:
        found = profile_model(
            model,
            cluster,
            database=database,
            refresh=refresh,
            timeout_seconds=timeout_seconds,
            on_progress=report,
        )
    for note in found.notes:
        print_note(note)
    if json:
        print_json(_description(found))
    else:
        _print(found)


def _description(found: MeasuredCluster) -> dict[str, Any]:
    return {**asdict(found.profile), "reports": [asdict(report) for report in found.reports]}


def _print(found: MeasuredCluster) -> None:
    from rich.table import Table
    from rich.text import Text

    profile = found.profile
    table = Table(title=Text(f"{profile.model}: {len(profile.pieces)} pieces, one micro-batch"))
    table.add_column("machine", overflow="fold")
    table.add_column("kernels")
    for heading in ("alone, ms", "together, ms", "GFLOP/s", "GB/s", "memory free"):
        table.add_column(heading, justify="right")
    for machine, report in zip(profile.machines, found.reports, strict=True):
        alone, contended = _sums(machine)
        table.add_row(
            Text(machine.machine),
            Text(_origins(report)),
            f"{alone * 1e3:.2f}",
            f"{contended * 1e3:.2f}",
            f"{machine.operations_per_second / 1e9:.0f}",
            f"{machine.bytes_per_second / 1e9:.1f}",
            bytes_text(machine.memory_free_bytes),
        )
    STDOUT.print(table)
    _print_links(profile)
    for report in found.reports:
        for problem in report.problems:
            _line(f"{report.machine}: estimated where a kernel could not be timed: {problem}")
    if any(report.cached for report in found.reports):
        _line("what is cached is measured again with --refresh")


def _print_links(profile: ClusterProfile) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="links")
    for heading in ("from", "to"):
        table.add_column(heading, overflow="fold")
    for heading in ("latency, ms", "MB/s"):
        table.add_column(heading, justify="right")
    table.add_column("origin")
    for link in profile.links:
        speeds = (f"{link.latency_seconds * 1e3:.2f}", f"{link.bytes_per_second / 1e6:.1f}")
        table.add_row(Text(link.source), Text(link.destination), *speeds, link.origin)
    STDOUT.print(table)
    for machine in profile.machines:
        cost = machine.streaming
        _line(
            f"{machine.machine}: a stream takes {cost.alone_transfer_seconds * 1e3:.2f} ms of it per tensor and makes "
            f"computing {cost.alone_ratio:.2f} times as long; {cost.transfer_seconds * 1e3:.2f} ms and "
            f"{cost.ratio:.2f} times while the others of its host compute too"
        )


def _sums(machine: MachineProfile) -> tuple[float, float]:
    times = machine.pieces.values()
    return sum(each.seconds for each in times), sum(each.contended_seconds for each in times)


def _origins(report: MachineReport) -> str:
    parts = []
    if report.measured:
        parts.append(f"{report.measured} measured")
    if report.cached:
        parts.append(f"{report.cached} cached ({age_text(report.oldest_seconds)} old)")
    if report.estimated:
        parts.append(f"{report.estimated} estimated")
    return ", ".join(parts)


def _line(text: str) -> None:
    STDOUT.print(text, markup=False, highlight=False, soft_wrap=True)
