"""The tables of `prove_gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rpc_runtime.client.worker_client import WorkerDescription
from scripts.device_limits import Limits
from scripts.torch_ways import WAYS
from tvm_split.compiler.instruction_sets import cpu_target, target_text
from tvm_split.units import bytes_text, seconds_text

SHOWN_KERNELS = 12


def print_limits(console: Console, worker: WorkerDescription, limits: Limits) -> None:
    """What the device is, and what was measured of it."""
    devices = [f"{each.arch} with {bytes_text(each.memory_bytes)}" for each in worker.cuda_devices]
    peaks = [f"{dtype} {peak / 1e12:.3g} TFLOP/s" for dtype, peak in limits.operations_per_second.items()]
    memory = f"memory {limits.bytes_per_second / 1e9:.4g} GB/s"
    cpu = target_text(cpu_target(worker.architecture, worker.cpu_features, worker.threads))
    console.print(", ".join([*(devices or [f"a CPU ({cpu}), {worker.threads} threads"]), *peaks, memory]))


def print_networks(console: Console, found: Sequence[dict[str, Any]]) -> None:
    ways = [way for way in WAYS if any(way in each["seconds"] or way in each["failed"] for each in found)]
    table = Table("network", "dtype", "batch", "difference", "ours", "of it computing", "a second", title="networks")
    for way in ways:
        table.add_column(f"torch {way}")
    table.add_column("ours / best of torch")
    for each in found:
        times = each["seconds"]
        others = [times[way] for way in ways if way in times]
        table.add_row(
            each["network"],
            each["dtype"],
            str(each["batch"]),
            f"{each['difference']:.1e}",
            seconds_text(times["ours"]),
            seconds_text(each["compute_seconds"] or 0.0),
            f"{each['per_second']:.1f}",
            *(seconds_text(times[way]) if way in times else "failed" * (way in each["failed"]) for way in ways),
            f"{times['ours'] / min(others):.2f}" if others else "",
        )
    console.print(table)


def print_compiled(console: Console, found: Sequence[dict[str, Any]], networks: Sequence[dict[str, Any]]) -> None:
    """torch's own compiler, beside what was measured of the same network."""
    ours = {(each["network"], each["dtype"], each["batch"]): each["seconds"]["ours"] for each in networks}
    table = Table("network", "torch.compile", "ours / torch.compile", title="torch.compile, float32, batch 1")
    for each in found:
        mine = ours.get((each["network"], each["dtype"], each["batch"]))
        if "failed" in each:
            table.add_row(each["network"], "failed", "")
        else:
            share = f"{mine / each['seconds']:.2f}" if mine else ""
            table.add_row(each["network"], seconds_text(each["seconds"]), share)
    if found:
        console.print(table)


def print_pipelines(console: Console, found: Sequence[dict[str, Any]]) -> None:
    table = Table("network", "link", "layers", "difference", "a second", "of 1 / slowest", title="pipelines")
    for each in found:
        table.add_row(
            each["network"],
            "1 Gbit/s, 1 ms" if each["far"] else ", ".join(each["transports"]),
            ", ".join(f"{machine}: {count}" for machine, count in each["layers"].items()),
            f"{each['difference']:.1e}",
            f"{each['per_second']:.1f}",
            f"{each['share_of_limit']:.2f}",
        )
    console.print(table)


def print_kernels(console: Console, found: Sequence[dict[str, Any]]) -> None:
    """Those that take longest, all their calls together."""
    for each in found:
        kernels = sorted(each["kernels"], key=lambda kernel: -kernel["seconds"] * kernel["calls"])
        table = Table("kernel", "rule", "calls", "time", "of its roofline", title=f"kernels of {each['network']}")
        for kernel in kernels[:SHOWN_KERNELS]:
            share = f"{kernel['share_of_roofline']:.0%}"
            row = (kernel["function"], kernel["rule"], str(kernel["calls"]), seconds_text(kernel["seconds"]), share)
            table.add_row(*row)
        if kernels:
            spent = sum(kernel["seconds"] * kernel["calls"] for kernel in kernels)
            ideal = sum(kernel["share_of_roofline"] * kernel["seconds"] * kernel["calls"] for kernel in kernels)
            table.add_row("all", "", "", seconds_text(spent), f"{ideal / spent:.0%}")
        console.print(table)
