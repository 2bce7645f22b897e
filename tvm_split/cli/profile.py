"""``tvm-split profile``: where the time of a model goes, kernel by kernel here, or piece by piece on a cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, new_table, print_json, print_line
from tvm_split.cli.found_machines import FoundMachines
from tvm_split.cli.model_source import ModelOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.planning import ClusterOptions
from tvm_split.progress import step_progress
from tvm_split.units import age_text, bytes_text, short_list

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tvm_split.cluster.cluster import Cluster
    from tvm_split.model import Model
    from tvm_split.profiling.cluster_profile import MachineReport, MeasuredCluster
    from tvm_split.profiling.kernel_report import KernelProfile, ModelProfile

MOST_LAYERS_SHOWN = 2


def profile(
    model: options.ModelArgument,
    shapes: ModelOptions,
    found: FoundMachines,
    workers: options.WorkersOption = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads to run with (default: all cores of this process; with --workers 1 each)."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Runs to take the medians of (default: 10).")] = None,
    calls: Annotated[
        bool, typer.Option("--calls", help="Every call in its order, instead of equal kernels together.")
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="On a cluster: measure again what is known already.")
    ] = False,
    database: options.DatabaseOption = None,
    timeout: options.TimeoutOption = 60.0,
    json: options.JsonOption = False,
) -> None:
    """Time every kernel of a model on this machine, beside what the machine can do at most.

    With --cluster, --tracker or --workers: time the pieces of the model on each of these machines, alone and together.
    """
    if found.is_given or workers is not None:
        for given, option in ((rounds is not None, "--rounds"), (calls, "--calls")):
            if given:
                raise WrongUseError("this is for one machine, without a cluster or --workers", option)
        machines = ClusterOptions(**vars(found), workers=workers, threads=threads).machines()
        loaded = shapes.load(model)
        _profile_on_cluster(loaded, machines, database=database, refresh=refresh, timeout_seconds=timeout, json=json)
        return
    if refresh:
        raise WrongUseError("only what a cluster's machines took is kept; give --cluster or --workers", "--refresh")
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.compiling import compile as compile_plan
    from tvm_split.planning import plan
    from tvm_split.profiling.kernel_report import ROUNDS, profile as profile_model

    loaded = shapes.load(model)
    here = Cluster.in_process(1, threads)
    bundle = compile_plan(loaded, plan(loaded, here, database=database), verify=False, database=database)
    with step_progress("timing") as report:
        threads = here.machines[0].threads
        times = profile_model(loaded, bundle, threads, database=database, rounds=rounds or ROUNDS, on_progress=report)
    rows = [_Row((each,)) for each in times.kernels] if calls else _grouped(times.kernels)
    if json:
        print_json(_description(times, rows))
    else:
        _print(times, rows)


@dataclass(frozen=True)
class _Row:
    """Calls that are shown together."""

    calls: tuple[KernelProfile, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.calls)

    @property
    def operations(self) -> float:
        return sum(each.kernel.operations for each in self.calls)

    @property
    def moved_bytes(self) -> int:
        return sum(each.kernel.moved_bytes for each in self.calls)

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys(layer for each in self.calls for layer in each.kernel.layers))

    @property
    def name(self) -> Text:
        kernel = self.calls[0].kernel
        rule, style = (f"{kernel.rule} (slow)", "red") if kernel.is_slow else (kernel.rule, "dim")
        layers = short_list(self.layers, MOST_LAYERS_SHOWN) or "(layout)"
        return Text.assemble(f"{kernel.function}\n  ", (rule, style), (f": {layers}", "dim"))


def _grouped(kernels: Sequence[KernelProfile]) -> list[_Row]:
    """Calls of one function together, the longest first."""
    groups: dict[str, list[KernelProfile]] = {}
    for each in kernels:
        groups.setdefault(each.kernel.function, []).append(each)
    return sorted((_Row(tuple(group)) for group in groups.values()), key=lambda row: -row.seconds)


def _description(found: ModelProfile, rows: Sequence[_Row]) -> dict[str, Any]:
    return {
        "model": found.model,
        "threads": found.threads,
        "seconds": found.seconds,
        "kernel_seconds": found.kernel_seconds,
        "operations": found.operations,
        "operations_per_second": found.operations / found.seconds,
        "share_of_peak": found.share_of_peak(found.operations, found.seconds),
        "peak_operations_per_second": found.ceilings.operations_per_second,
        "peak_bytes_per_second": found.ceilings.bytes_per_second,
        "slow_share": found.slow_share,
        "untimed": found.untimed,
        "kernels": [
            {
                "function": row.calls[0].kernel.function,
                "rule": row.calls[0].kernel.rule,
                "choices": row.calls[0].kernel.choices,
                "slow": row.calls[0].kernel.is_slow,
                "calls": len(row.calls),
                "seconds": row.seconds,
                "share_of_time": row.seconds / found.kernel_seconds,
                "operations": row.operations,
                "moved_bytes": row.moved_bytes,
                "share_of_peak": found.share_of_peak(row.operations, row.seconds),
                "layers": row.layers,
            }
            for row in rows
        ],
    }


def _print(found: ModelProfile, rows: Sequence[_Row]) -> None:
    peak, bandwidth = found.ceilings.operations_per_second, found.ceilings.bytes_per_second
    threads = f"{found.threads} thread{'' if found.threads == 1 else 's'}"
    title = f"{found.model}: {found.seconds * 1e3:.2f} ms, one input at a time, {threads}"
    cells = (
        (
            row.name,
            str(len(row.calls)),
            f"{row.seconds * 1e3:.3f}",
            f"{row.seconds / found.kernel_seconds:.1%}",
            f"{row.operations / row.seconds / 1e9:.1f}",
            f"{found.share_of_peak(row.operations, row.seconds):.0%}",
            f"{row.moved_bytes / row.seconds / 1e9:.1f}",
        )
        for row in rows
    )
    numbers = ("calls", "ms", "share", "GFLOP/s", "of peak", "GB/s")
    STDOUT.print(new_table(title, ("kernel, rule, layers",), numbers, cells))
    print_line(
        f"{found.operations / 1e9:.2f} GFLOP at {found.operations / found.seconds / 1e9:.0f} GFLOP/s, "
        f"{found.share_of_peak(found.operations, found.seconds):.0%} of {peak / 1e9:.0f}; "
        f"this machine reads {bandwidth / 1e9:.1f} GB/s (both measured now)"
    )
    if found.untimed:
        print_line(f"{found.untimed} calls are not listed: their kernels need not end on made-up values")
    if found.slow_share > 0:
        print_line(f"{found.slow_share:.1%} of the time is in kernels that no schedule took: they run as plain loops")


def _profile_on_cluster(
    model: Model, cluster: Cluster, *, database: Path | None, refresh: bool, timeout_seconds: float, json: bool
) -> None:
    """Measure what is not known yet, and show it all."""
    from tvm_split.profiling.cluster_profile import profile_model

    with step_progress("profiling") as report:
        found = profile_model(
            model,
            cluster,
            database=database,
            refresh=refresh,
            timeout_seconds=timeout_seconds,
            on_progress=report,
        )
    if json:
        print_json({**asdict(found.profile), "reports": [asdict(report) for report in found.reports]})
    else:
        _print_cluster(found)


def _print_cluster(found: MeasuredCluster) -> None:
    profile = found.profile
    title = f"{profile.model}: {len(profile.pieces)} pieces, one micro-batch"
    numbers = ("alone, ms", "together, ms", "GFLOP/s", "GB/s", "free")
    machines = (
        (
            machine.machine,
            _origins(report),
            f"{sum(each.seconds for each in machine.pieces.values()) * 1e3:.2f}",
            f"{sum(each.contended_seconds for each in machine.pieces.values()) * 1e3:.2f}",
            f"{machine.operations_per_second / 1e9:.0f}",
            f"{machine.bytes_per_second / 1e9:.1f}",
            bytes_text(machine.memory_free_bytes),
        )
        for machine, report in zip(profile.machines, found.reports, strict=True)
    )
    links = (
        (
            each.source,
            each.destination,
            f"{each.origin} ({each.transport})" if each.transport else each.origin,
            f"{each.latency_seconds * 1e3:.2f}",
            f"{each.bytes_per_second / 1e6:.1f}",
        )
        for each in profile.links
    )
    STDOUT.print(new_table(title, ("machine", "kernels"), numbers, machines))
    STDOUT.print(new_table("links", ("from", "to", "origin"), ("latency, ms", "MB/s"), links))
    for machine in profile.machines:
        cost = machine.streaming
        print_line(
            f"{machine.machine}: a stream takes {cost.alone_transfer_seconds * 1e3:.2f} ms of it per tensor and makes "
            f"computing {cost.alone_ratio:.2f} times as long; {cost.transfer_seconds * 1e3:.2f} ms and "
            f"{cost.ratio:.2f} times while the others of its host compute too"
        )
    for report in found.reports:
        for problem in report.problems:
            print_line(f"{report.machine}: estimated where a kernel could not be timed: {problem}")
    if any(report.cached for report in found.reports):
        print_line("what is cached is measured again with --refresh")


def _origins(report: MachineReport) -> str:
    parts = []
    if report.measured:
        parts.append(f"{report.measured} measured")
    if report.cached:
        parts.append(f"{report.cached} cached ({age_text(report.oldest_seconds)} old)")
    if report.estimated:
        parts.append(f"{report.estimated} estimated")
    return ", ".join(parts)
