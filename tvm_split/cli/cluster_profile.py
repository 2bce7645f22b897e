"""``tvm-split profile --cluster``: what a model's pieces take on the machines of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tvm_split.cli.console import STDOUT, new_table, print_json, print_line, print_note
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
    from rich.text import Text

    profile = found.profile
    title = f"{profile.model}: {len(profile.pieces)} pieces, one micro-batch"
    numbers = ("alone, ms", "together, ms", "GFLOP/s", "GB/s", "free")
    table = new_table(title, ("machine", "kernels"), numbers)
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
            print_line(f"{report.machine}: estimated where a kernel could not be timed: {problem}")
    if any(report.cached for report in found.reports):
        print_line("what is cached is measured again with --refresh")


def _print_links(profile: ClusterProfile) -> None:
    from rich.text import Text

    table = new_table("links", ("from", "to", "origin"), ("latency, ms", "MB/s"))
    for link in profile.links:
        speeds = (f"{link.latency_seconds * 1e3:.2f}", f"{link.bytes_per_second / 1e6:.1f}")
        table.add_row(Text(link.source), Text(link.destination), link.origin, *speeds)
    STDOUT.print(table)
    for machine in profile.machines:
        cost = machine.streaming
        print_line(
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
