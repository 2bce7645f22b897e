"""How well computing, sending and receiving overlap: measured throughput against what the slowest stage allows.

Two stages of about equal cost on two workers of one core each. The limit is 1 / (slowest stage's compute time), taken
from the stages' own statistics in the same run. Interleaved with the same network on one worker, so that the gain of
the second core shows too. Prints medians over rounds and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tvm_split
from tvm_split.deployment.benchmark import bench


class Tower(nn.Module):
    """Equal convolutions, so that two equal stages are easy to cut: 56×56 pixels, 64 channels, 3×3."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def measure(deployment: tvm_split.Deployment, x: torch.Tensor, count: int) -> dict[str, float]:
    """Throughput of one stream, and the slowest stage's median compute time in it."""
    report = bench(deployment, [(x,)], rounds=1, micro_batches=count)
    assert report.period.measured is not None
    slowest = max(each.compute.measured or 0.0 for each in report.machines)
    period = report.period.measured
    return {"per_second": 1 / period, "slowest_compute_seconds": slowest, "share": slowest / period}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=24, help="convolutions in all (default 24)")
    parser.add_argument("--micro-batches", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console()
    torch.manual_seed(0)
    x = torch.randn(1, 64, 56, 56)
    network = Tower(arguments.depth).eval()
    for layer in network.layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    half = arguments.depth // 2
    split = {"machine-a": ["layers.0"], "machine-b": [f"layers.{half}"]}
    rounds: dict[str, list[dict[str, float]]] = {"two workers": [], "one worker": []}
    with (
        tvm_split.compile_and_deploy(network, (x,), tvm_split.Cluster.local(2), split=split) as two,
        tvm_split.compile_and_deploy(network, (x,), tvm_split.Cluster.local(1)) as one,
    ):
        for _ in range(arguments.rounds):
            rounds["two workers"].append(measure(two, x, arguments.micro_batches))
            rounds["one worker"].append(measure(one, x, arguments.micro_batches // 2))
    table = Table("", "inputs/s", "slowest stage, ms", "share of 1 / slowest stage")
    medians = {}
    for name, results in rounds.items():
        medians[name] = {key: statistics.median(each[key] for each in results) for key in results[0]}
        found = medians[name]
        table.add_row(
            name,
            f"{found['per_second']:.1f}",
            f"{found['slowest_compute_seconds'] * 1e3:.2f}",
            f"{found['share']:.3f}",
        )
    console.print(table)
    gain = medians["two workers"]["per_second"] / medians["one worker"]["per_second"]
    console.print(f"gain of the second core: {gain:.2f}")
    if arguments.output:
        arguments.output.write_text(json.dumps({"medians": medians, "gain": gain, "rounds": rounds}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
