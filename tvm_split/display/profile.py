"""Show a model's profile: its kernels on one machine, or its pieces on each machine of a cluster."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from tvm_split.display.view import Row, Table, View, as_json, view
from tvm_split.placement.profile import ClusterProfile
from tvm_split.profiling.cluster_profile import KernelProfile, MachineReport, ModelProfile
from tvm_split.units import age_text, bytes_text, count_text, short_list

MOST_LAYERS_SHOWN = 2
ABOVE_PEAK = "*"
"""Marks a share of the peak above 100 %."""


@as_json.register
def profile_as_json(profile: ModelProfile) -> dict[str, Any]:
    """Return the times, operations and bytes of each call of a kernel, with the machine's peaks, as JSON values."""
    return {
        **asdict(profile),
        "peaks": {name: rate for name, rate in asdict(profile.peaks).items() if name != "call_seconds"},
        "kernel_seconds": profile.kernel_seconds,
        "other_seconds": profile.other_seconds,
        "operations": profile.operations,
        "share_of_peak": profile.share_of_peak(profile.operations, profile.seconds),
        "kernels": [
            {
                **asdict(call.kernel),
                "slow": call.kernel.is_slow,
                "seconds": call.seconds,
                "share_of_time": profile.share_of_time(call.seconds),
            }
            for call in profile.kernels
        ],
    }


@view.register
def view_of_kernels(profile: ModelProfile, *, details: bool = False) -> View:
    """Return a table with a row for each distinct kernel, the longest first; with ``details``, for each call in order.

    Each row has the kernel's share of the machine's peaks.
    """
    peak, bandwidth = profile.peaks.operations_per_second, profile.peaks.bytes_per_second
    threads = count_text(profile.threads, "thread")
    title = f"{profile.model}: {profile.seconds * 1e3:.2f} ms, one input at a time, {threads}"
    calls: dict[int | str, list[KernelProfile]] = {}
    for place, call in enumerate(profile.kernels):
        calls.setdefault(place if details else call.kernel.function, []).append(call)
    order = calls.values() if details else sorted(calls.values(), key=_seconds, reverse=True)
    rows = [_row(profile, same_kernel) for same_kernel in order]
    share = _share_of_peak(profile, profile.operations, profile.seconds)
    lines = [
        f"{profile.operations / 1e9:.2f} GFLOP at {profile.operations / profile.seconds / 1e9:.0f} GFLOP/s, "
        f"{share} of {peak / 1e9:.0f}; this machine reads {bandwidth / 1e9:.1f} GB/s (both measured now)"
    ]
    other = profile.other_seconds
    if other > 0:
        rows.append(
            ("besides these kernels", "", f"{other * 1e3:.3f}", f"{profile.share_of_time(other):.1%}", *[""] * 3)
        )
    elif profile.kernels:
        lines.append(
            f"timed one by one, the kernels take {profile.kernel_seconds * 1e3:.2f} ms; the shares are of this time"
        )
    if any(str(text).endswith(ABOVE_PEAK) for text in (share, *(row[5] for row in rows))):
        lines.append(
            f"{ABOVE_PEAK} faster than the measured peak: the algorithm needs fewer operations than the layer's "
            "definition (Winograd), or other programs slowed the measurement of the peak"
        )
    if profile.untimed:
        lines.append(
            f"{count_text(profile.untimed, 'call')} not listed: the kernels could not be timed with random values"
        )
    slow = _seconds([call for call in profile.kernels if call.kernel.is_slow])
    if slow > 0:
        share = f"{profile.share_of_time(slow):.1%}"
        lines.append(f"{share} of the time is in kernels that no schedule took: they run as plain loops")
    numbers = ("calls", "ms", "share", "GFLOP/s", "of peak", "GB/s")
    return [Table(title, ("kernel, rule, layers",), numbers, rows), *lines]


def _row(profile: ModelProfile, calls: Sequence[KernelProfile]) -> Row:
    kernel, seconds = calls[0].kernel, _seconds(calls)
    rule, style = (f"{kernel.rule} (slow)", "red") if kernel.is_slow else (kernel.rule, "dim")
    layers = list(dict.fromkeys(layer for call in calls for layer in call.kernel.layers))
    shown = short_list(layers, MOST_LAYERS_SHOWN) or "(layout)"
    operations = sum(call.kernel.operations for call in calls)
    return (
        Text.assemble(f"{kernel.function}\n  ", (rule, style), (f": {shown}", "dim")),
        str(len(calls)),
        f"{seconds * 1e3:.3f}",
        f"{profile.share_of_time(seconds):.1%}",
        f"{operations / seconds / 1e9:.1f}",
        _share_of_peak(profile, operations, seconds),
        f"{sum(call.kernel.moved_bytes for call in calls) / seconds / 1e9:.1f}",
    )


def _seconds(calls: Sequence[KernelProfile]) -> float:
    return sum(call.seconds for call in calls)


def _share_of_peak(profile: ModelProfile, operations: float, seconds: float) -> str:
    share = profile.share_of_peak(operations, seconds)
    return f"{share:.0%}{ABOVE_PEAK if share > 1 else ''}"


@dataclass(frozen=True)
class ShownProfile:
    """The profile of a cluster, and how each machine's times were obtained."""

    profile: ClusterProfile
    reports: Sequence[MachineReport]


@view.register
def view_of_cluster(shown: ShownProfile, *, details: bool = False) -> View:
    """Return the measurements of each machine and link."""
    profile = shown.profile
    title = f"{profile.model}: {count_text(len(profile.pieces), 'piece')}, one micro-batch"
    numbers = ("alone, ms", "contended, ms", "GFLOP/s", "GB/s", "free")
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
        for machine, report in zip(profile.machines, shown.reports, strict=True)
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
    lines = [
        *(
            f"{machine.machine}: each transferred tensor takes {machine.streaming.transfer_seconds * 1e3:.2f} ms "
            "of its computing time"
            for machine in profile.machines
        ),
        *(
            f"{report.machine}: estimated where a kernel could not be timed: {problem}"
            for report in shown.reports
            for problem in report.problems
        ),
    ]
    if any(report.cached for report in shown.reports):
        lines.append("cached times are measured again with --refresh")
    return [
        Table(title, ("machine", "kernels"), numbers, machines),
        Table("links", ("source", "destination", "origin"), ("latency, ms", "MB/s"), links),
        *lines,
    ]


@as_json.register
def cluster_as_json(shown: ShownProfile) -> dict[str, Any]:
    """Return the profile, and a report for each machine, as JSON values."""
    profile = {name: value for name, value in asdict(shown.profile).items() if name != "kept"}  # keys of the cache
    return {**profile, "reports": [asdict(report) for report in shown.reports]}


def _origins(report: MachineReport) -> str:
    age = f" ({age_text(report.oldest_seconds)} old)"
    counts = {"measured": report.measured, f"cached{age}": report.cached, "estimated": report.estimated}
    return ", ".join(f"{count} {origin}" for origin, count in counts.items() if count)
