"""Simulated and measured throughput and latency of real small deployments on this host.

A chain of equal convolutions on 2, 4, 8 and 16 workers of one thread each, as many stages as workers, and on two
replicas; 64 linear layers that are so small that there is more passing on than computing; ResNet-50; and the network
of the demonstration, in its micro-batches, on as many workers as there.
Each is profiled, planned and simulated; what was predicted and simulated is written down, and only then the plan is
deployed and measured, several times over. Where there are fewer cores than workers, these share them, in both. Fails
where what was simulated is off by more than 10 % of all that was measured: the median and its range are printed, and
where equal runs part by more than 10 %, no prediction can be nearer than that. Beside it stands which share of the
cores others used meanwhile: figures of a busy machine say little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tvm_split
from rpc_runtime.scratch import ScratchFolder
from scripts.rounds import written
from tests.models import torch_models
from tvm_split.demo.demonstration import MICRO_BATCH
from tvm_split.demo.network import CHANNELS as IMAGE_CHANNELS, IMAGE_SIZE, DigitNetwork
from tvm_split.deployment.benchmark import bench
from tvm_split.profiling.cluster_profile import profile_model
from tvm_split.progress import step_progress
from tvm_split.simulation.of_prediction import scenario_of_plan
from tvm_split.simulation.simulate import simulate

AIM = 0.10
BLOCKS, CHANNELS, PIXELS = 24, 64, 28
LAYERS, FEATURES = 64, 64


@dataclass(frozen=True)
class Case:
    """A network on so many workers, in as many stages or as replicas of one."""

    workers: int
    network: str = "convolutions"
    replicas: bool = False

    @property
    def name(self) -> str:
        return f"{self.workers} {'replicas' if self.replicas else 'workers'}, {self.network}"


CASES = (
    *(Case(2), Case(4), Case(8), Case(2, replicas=True), Case(16)),
    *(Case(2, "linear layers"), Case(8, "linear layers"), Case(2, "ResNet-50"), Case(3, "demo")),
)


@dataclass(frozen=True)
class Expected:
    """Seconds, as they were written down before anything was measured; ``doubts`` are the profile's."""

    case: str
    oversubscription: float
    predicted_period: float
    simulated_period: float
    predicted_latency: float
    simulated_latency: float
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Seconds of equal runs one after the other, and the share of the cores that others used meanwhile."""

    periods: tuple[float, ...]
    latencies: tuple[float, ...]
    others: float


def network(name: str, blocks: int = BLOCKS) -> tuple[nn.Module, torch.Tensor]:
    """The network and an input."""
    torch.manual_seed(0)
    if name == "linear layers":
        return nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)]).eval(), torch.randn(1, FEATURES)
    if name == "ResNet-50":
        build, (x,) = torch_models.published_models()["resnet50"]
        return build(), x
    if name == "demo":
        return DigitNetwork().eval(), torch.randn(MICRO_BATCH, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    layers = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*layers).eval(), torch.randn(1, CHANNELS, PIXELS, PIXELS)


def spread(values: Sequence[float]) -> float:
    """By how much equal runs parted, least and most, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values)


def is_good(expected: float, measured: Sequence[float]) -> bool:
    """Whether a figure is within the aim of what was measured, or of the range in which equal runs were."""
    return min(measured) * (1 - AIM) <= expected <= max(measured) * (1 + AIM)


def is_within(expected: float, measured: Sequence[float]) -> bool:
    """Whether it is within the aim of the median alone."""
    return abs(expected / statistics.median(measured) - 1) <= AIM


class Others:
    """What other processes use of the cores: all that is used, without this process and those that it has started."""

    def __init__(self) -> None:
        self._since = time.perf_counter(), self._used()

    @property
    def share(self) -> float:
        """Of all cores, since this was made; processes that came or went meanwhile are counted as others."""
        begin, used = self._since
        return max(0.0, (self._used() - used) / (time.perf_counter() - begin) / (os.cpu_count() or 1))

    @staticmethod
    def _used() -> float:
        whole = psutil.cpu_times()
        me = psutil.Process()
        own = [each.cpu_times() for each in (me, *me.children(recursive=True))]
        return sum(whole) - whole.idle - getattr(whole, "iowait", 0.0) - sum(each.user + each.system for each in own)


def compare(
    case: Case, blocks: int, repeats: int, rounds: int, micro_batches: int, folder: Path | None
) -> tuple[Expected, Measured]:
    module, x = network(case.network, blocks)
    model = tvm_split.load_model(module, (x,))
    with tvm_split.Cluster.local(workers=case.workers) as cluster, ScratchFolder("profiles") as profiles:
        with step_progress("profiling") as progress:
            profile = profile_model(model, cluster, cache_folder=profiles.path, on_progress=progress).profile
        stages = 1 if case.replicas else case.workers
        plan = tvm_split.plan(model, cluster, stages=stages, replicas=case.replicas, profile=profile)
        expected = expected_of(case, plan)
        if folder is not None:
            written(folder / f"{case.name.replace(', ', '_').replace(' ', '_')}_expected.json", asdict(expected))
        with tvm_split.deploy(tvm_split.compile(model, plan, verify=False), cluster) as deployment:
            periods, latencies = [], []
            others = Others()
            for _ in range(repeats):
                report = bench(deployment, [(x,)], rounds=rounds, micro_batches=micro_batches)
                assert report.period.measured is not None
                assert report.latency.measured is not None
                periods.append(report.period.measured)
                latencies.append(report.latency.measured)
            return expected, Measured(tuple(periods), tuple(latencies), others.share)


def expected_of(case: Case, plan: tvm_split.Plan) -> Expected:
    prediction, simulated = plan.prediction, simulate(scenario_of_plan(plan))
    assert prediction is not None
    assert simulated.period_seconds is not None
    assert simulated.single is not None
    return Expected(
        case=case.name,
        oversubscription=max((each.oversubscription for each in prediction.shared_cores), default=1.0),
        predicted_period=prediction.period_seconds,
        simulated_period=simulated.period_seconds,
        predicted_latency=prediction.latency_seconds,
        simulated_latency=simulated.single.percentiles_seconds[50],
        doubts=prediction.doubts,
    )


def are_good(expected: Expected, measured: Measured) -> bool:
    return is_good(expected.simulated_period, measured.periods) and is_good(
        expected.simulated_latency, measured.latencies
    )


def print_table(console: Console, results: Sequence[tuple[Expected, Measured]]) -> None:
    table = Table(title="milliseconds between two results, and of one alone; ratios are to the median of equal runs")
    table.add_column("deployment")
    for heading in ("measured", "parted by", "predicted", "simulated", "alone", "parted by", "predicted", "simulated"):
        table.add_column(heading, justify="right")
    table.add_column("others", justify="right")
    for expected, measured in results:
        row = [expected.case]
        for values, predicted, simulated in (
            (measured.periods, expected.predicted_period, expected.simulated_period),
            (measured.latencies, expected.predicted_latency, expected.simulated_latency),
        ):
            middle = statistics.median(values)
            row += [f"{middle * 1e3:.3f}", f"{spread(values):.0%}"]
            row += [f"{each * 1e3:.3f} ({each / middle:.2f})" for each in (predicted, simulated)]
        table.add_row(*row, f"{measured.others:.0%}")
    console.print(table)
    for expected, measured in results:
        for what, values in (("results", measured.periods), ("single results", measured.latencies)):
            if spread(values) > AIM:
                least, most = min(values) * 1e3, max(values) * 1e3
                console.print(
                    f"{expected.case}: equal runs part by more than {AIM:.0%}: {what} every "
                    f"{least:.3f} to {most:.3f} ms"
                )
        for doubt in expected.doubts:
            console.print(f"{expected.case}: {doubt}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = range(1, len(CASES) + 1)
    parser.add_argument("--case", type=int, choices=numbers, action="append", help="only this one; repeatable")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="convolutions of the network")
    parser.add_argument("--repeats", type=int, default=3, help="equal runs, by which measurements part")
    parser.add_argument("--rounds", type=int, default=3, help="of each run")
    parser.add_argument("--micro-batches", type=int, default=200, help="of each round's stream")
    parser.add_argument("--tell", action="store_true", help="do not fail, whatever the figures are")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(140, Console().width))
    results = []
    folder = None if arguments.output is None else arguments.output.parent
    for number in arguments.case or numbers:
        sizes = arguments.blocks, arguments.repeats, arguments.rounds, arguments.micro_batches
        results.append(compare(CASES[number - 1], *sizes, folder))
        print_table(console, results[-1:])
    if len(results) > 1:
        print_table(console, results)
    figures = [
        {
            **asdict(expected),
            **asdict(measured),
            "spreads": (spread(measured.periods), spread(measured.latencies)),
            "within_aim": is_within(expected.simulated_period, measured.periods)
            and is_within(expected.simulated_latency, measured.latencies),
            "good": are_good(expected, measured),
        }
        for expected, measured in results
    ]
    written(arguments.output, {"results": figures})
    parted = [expected.case for expected, measured in results if not are_good(expected, measured)]
    if parted:
        console.print(f"simulated, and all that was measured, differ by more than {AIM:.0%}: {'; '.join(parted)}")
    return 1 if parted and not arguments.tell else 0


if __name__ == "__main__":
    sys.exit(main())
