"""Show a model's profile: its kernels on one machine, or its pieces on each machine of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from tvm_split.display.view import Row, Table, View, as_json, view
from tvm_split.profiling.cluster_profile import MachineReport, MeasuredCluster
from tvm_split.profiling.kernel_report import KernelProfile, ModelProfile
from tvm_split.units import age_text, bytes_text, short_list

MOST_LAYERS_SHOWN = 2
ABOVE_PEAK = "*"
"""Marks a share of the peak above 100 %."""


@dataclass(frozen=True)
class _Row:
    """Kernel calls that are shown in one row."""

    calls: tuple[KernelProfile, ...]

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)

    @property
    def operations(self) -> float:
        return sum(call.kernel.operations for call in self.calls)

    @property
    def moved_bytes(self) -> int:
        return sum(call.kernel.moved_bytes for call in self.calls)

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys(layer for call in self.calls for layer in call.kernel.layers))

    @property
    def name(self) -> Text:
        kernel = self.calls[0].kernel
        rule, style = (f"{kernel.rule} (slow)", "red") if kernel.is_slow else (kernel.rule, "dim")
        layers = short_list(self.layers, MOST_LAYERS_SHOWN) or "(layout)"
        return Text.assemble(f"{kernel.function}\n  ", (rule, style), (f": {layers}", "dim"))


@dataclass(frozen=True)
class ProfiledKernels:
    """The kernels of a model, grouped into the rows in which they are shown."""

    profile: ModelProfile
    rows: Sequence[_Row]

    @classmethod
    def of(cls, profile: ModelProfile, *, calls: bool) -> ProfiledKernels:
        """Make one row per call in order, or one row per function, the longest total time first."""
        if calls:
            return cls(profile, [_Row((kernel,)) for kernel in profile.kernels])
        groups: dict[str, list[KernelProfile]] = {}
        for kernel_profile in profile.kernels:
            groups.setdefault(kernel_profile.kernel.function, []).append(kernel_profile)
        return cls(profile, sorted((_Row(tuple(group)) for group in groups.values()), key=lambda row: -row.seconds))


@view.register
def view_of_model_profile(profile: ModelProfile, *, details: bool = False) -> View:
    """Return the view of `ProfiledKernels`; ``details`` has one row per call."""
    return view(ProfiledKernels.of(profile, calls=details))


@as_json.register
def profile_as_json(profiled: ProfiledKernels) -> dict[str, Any]:
    """Return the time, operations and bytes of each kernel, with the machine's peaks, as JSON values."""
    profile = profiled.profile
    return {
        "model": profile.model,
        "threads": profile.threads,
        "seconds": profile.seconds,
        "kernel_seconds": profile.kernel_seconds,
        "other_seconds": profile.other_seconds,
        "operations": profile.operations,
        "operations_per_second": profile.operations / profile.seconds,
        "share_of_peak": profile.share_of_peak(profile.operations, profile.seconds),
        "peak_operations_per_second": profile.ceilings.operations_per_second,
        "peak_bytes_per_second": profile.ceilings.bytes_per_second,
        "slow_share": profile.slow_share,
        "untimed": profile.untimed,
        "kernels": [
            {
                "function": row.calls[0].kernel.function,
                "rule": row.calls[0].kernel.rule,
                "choices": row.calls[0].kernel.choices,
                "slow": row.calls[0].kernel.is_slow,
                "calls": len(row.calls),
                "seconds": row.seconds,
                "share_of_time": profile.share_of_time(row.seconds),
                "operations": row.operations,
                "moved_bytes": row.moved_bytes,
                "share_of_peak": profile.share_of_peak(row.operations, row.seconds),
                "layers": row.layers,
            }
            for row in profiled.rows
        ],
    }


@view.register
def view_of_kernels(profiled: ProfiledKernels, *, details: bool = False) -> View:
    """Return a table with a row for each kernel, with its share of the machine's peaks."""
    profile = profiled.profile
    peak, bandwidth = profile.ceilings.operations_per_second, profile.ceilings.bytes_per_second
    threads = f"{profile.threads} thread{'' if profile.threads == 1 else 's'}"
    title = f"{profile.model}: {profile.seconds * 1e3:.2f} ms, one input at a time, {threads}"
    marked = False

    def share_of_peak(operations: float, seconds: float) -> str:
        nonlocal marked
        share = profile.share_of_peak(operations, seconds)
        marked = marked or share > 1
        return f"{share:.0%}{ABOVE_PEAK if share > 1 else ''}"

    cells: list[Row] = [
        (
            row.name,
            str(len(row.calls)),
            f"{row.seconds * 1e3:.3f}",
            f"{profile.share_of_time(row.seconds):.1%}",
            f"{row.operations / row.seconds / 1e9:.1f}",
            share_of_peak(row.operations, row.seconds),
            f"{row.moved_bytes / row.seconds / 1e9:.1f}",
        )
        for row in profiled.rows
    ]
    numbers = ("calls", "ms", "share", "GFLOP/s", "of peak", "GB/s")
    lines = [
        f"{profile.operations / 1e9:.2f} GFLOP at {profile.operations / profile.seconds / 1e9:.0f} GFLOP/s, "
        f"{share_of_peak(profile.operations, profile.seconds)} of {peak / 1e9:.0f}; "
        f"this machine reads {bandwidth / 1e9:.1f} GB/s (both measured now)"
    ]
    other = profile.other_seconds
    if other > 0:
        cells.append(
            ("besides these kernels", "", f"{other * 1e3:.3f}", f"{profile.share_of_time(other):.1%}", *[""] * 3)
        )
    elif profile.kernels:
        lines.append(f"one by one the kernels take {profile.kernel_seconds * 1e3:.2f} ms, of which the shares are")
    if marked:
        lines.append(
            f"{ABOVE_PEAK} faster than the measured peak: the algorithm needs fewer operations than the layer's "
            "definition (Winograd), or other programs slowed the measurement of the peak"
        )
    if profile.untimed:
        lines.append(f"{profile.untimed} calls are not listed: their kernels need not end on made-up values")
    if profile.slow_share > 0:
        lines.append(
            f"{profile.slow_share:.1%} of the time is in kernels that no schedule took: they run as plain loops"
        )
    return [Table(title, ("kernel, rule, layers",), numbers, cells), *lines]


@view.register
def view_of_cluster(measured: MeasuredCluster, *, details: bool = False) -> View:
    """Return the measurements of each machine and link."""
    profile = measured.profile
    title = f"{profile.model}: {len(profile.pieces)} pieces, one micro-batch"
    numbers = ("alone, ms", "together, ms", "GFLOP/s", "GB/s", "free")
    machines = [
        (
            machine.machine,
            _origins(report),
            f"{sum(piece.seconds for piece in machine.pieces.values()) * 1e3:.2f}",
            f"{sum(piece.contended_seconds for piece in machine.pieces.values()) * 1e3:.2f}",
            f"{machine.operations_per_second / 1e9:.0f}",
            f"{machine.bytes_per_second / 1e9:.1f}",
            bytes_text(machine.memory_free_bytes),
        )
        for machine, report in zip(profile.machines, measured.reports, strict=True)
    ]
    links = [
        (
            link.source,
            link.destination,
            f"{link.origin} ({link.transport})" if link.transport else link.origin,
            f"{link.latency_seconds * 1e3:.2f}",
            f"{link.bytes_per_second / 1e6:.1f}",
        )
        for link in profile.links
    ]
    lines = []
    for machine in profile.machines:
        cost = machine.streaming
        lines.append(f"{machine.machine}: a stream takes {cost.transfer_seconds * 1e3:.2f} ms of it per tensor")
    for report in measured.reports:
        for problem in report.problems:
            lines.append(f"{report.machine}: estimated where a kernel could not be timed: {problem}")
    if any(report.cached for report in measured.reports):
        lines.append("what is cached is measured again with --refresh")
    return [
        Table(title, ("machine", "kernels"), numbers, machines),
        Table("links", ("from", "to", "origin"), ("latency, ms", "MB/s"), links),
        *lines,
    ]


@as_json.register
def cluster_as_json(measured: MeasuredCluster) -> dict[str, Any]:
    """Return the profile, and a report for each machine, as JSON values."""
    return {**asdict(measured.profile), "reports": [asdict(report) for report in measured.reports]}


def _origins(report: MachineReport) -> str:
    parts = []
    if report.measured:
        parts.append(f"{report.measured} measured")
    if report.cached:
        parts.append(f"{report.cached} cached ({age_text(report.oldest_seconds)} old)")
    if report.estimated:
        parts.append(f"{report.estimated} estimated")
    return ", ".join(parts)
