"""Simulated and measured throughput and latency of real small deployments on this host.

A chain of equal convolutions on 2, 4, 8 and 16 workers of one thread each, as many stages as workers, and on two
replicas; and 64 linear layers that are so small that there is more passing on than computing.
Each is profiled, planned, deployed and measured; then its plan is simulated, with the scatter that single runs show,
and once more with the computing times that were measured in the stream, where workers do not share cores. Where there
are fewer cores than workers, these share them, in both. Writes JSON; fails where what was simulated of the prediction
is off by more than 10 %, which a disturbed or busy machine may bring about, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tvm_split
from scripts.rounds import written
from tvm_split.deployment.benchmark import bench
from tvm_split.deployment.deployment_report import DeploymentReport
from tvm_split.measuring.model_profiling import profile_model
from tvm_split.progress import step_progress
from tvm_split.rpc_runtime.program.measurements import COMPUTE, TraceEvent
from tvm_split.rpc_runtime.scratch import ScratchFolder
from tvm_split.simulation.of_plans import scenario_of_plan, with_measured_compute
from tvm_split.simulation.scenario import Happenings
from tvm_split.simulation.simulate import Simulation, simulate

AIM = 0.10
BLOCKS, CHANNELS, PIXELS = 24, 64, 28
LAYERS, FEATURES = 64, 64
SINGLE_RUNS = 30


@dataclass(frozen=True)
class Case:
    """So many workers, in as many stages or as replicas of one, of convolutions or of linear layers."""

    workers: int
    replicas: bool = False
    linear: bool = False

    @property
    def name(self) -> str:
        layers = ", linear layers" if self.linear else ""
        return f"{self.workers} {'replicas' if self.replicas else 'workers'}{layers}"


CASES = (
    *(Case(2), Case(4), Case(8), Case(2, replicas=True), Case(16)),
    *(Case(2, linear=True), Case(8, linear=True)),
)


@dataclass(frozen=True)
class Compared:
    """Periods and latencies in seconds; ``with_measured`` is None where waiting for cores is in what was measured."""

    case: str
    crowding: float
    scatter: float
    measured_period: float
    predicted_period: float
    simulated_period: float
    with_measured: float | None
    measured_latency: float
    predicted_latency: float
    simulated_latency: float

    @property
    def is_good(self) -> bool:
        ratios = self.simulated_period / self.measured_period, self.simulated_latency / self.measured_latency
        return all(abs(each - 1) <= AIM for each in ratios)


def network(blocks: int, *, linear: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """The network and an input."""
    torch.manual_seed(0)
    if linear:
        return nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)]).eval(), torch.randn(1, FEATURES)
    layers = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*layers).eval(), torch.randn(1, CHANNELS, PIXELS, PIXELS)


def compare(case: Case, blocks: int, rounds: int, micro_batches: int) -> Compared:
    module, x = network(blocks, linear=case.linear)
    model = tvm_split.load_model(module, (x,))
    with tvm_split.Cluster.local(workers=case.workers) as cluster, ScratchFolder("profiles") as profiles:
        with step_progress("profiling") as progress:
            profile = profile_model(model, cluster, cache_folder=profiles.path, on_progress=progress).profile
        stages = 1 if case.replicas else case.workers
        plan = tvm_split.plan(model, cluster, stages=stages, replicas=case.replicas, profile=profile)
        with tvm_split.deploy(tvm_split.compile(model, plan, verify=False), cluster) as deployment:
            for _ in range(SINGLE_RUNS):
                deployment.run(x)
            scatter = scatter_of(deployment.trace())
            report = bench(deployment, [(x,)], rounds=rounds, micro_batches=micro_batches)
    return compared(case, plan, report, scatter)


def scatter_of(events: Sequence[TraceEvent]) -> float:
    """How single runs' computing scatters, as a share of its mean: the median of the stages'. Quartiles count, so that
    a single disturbance does not."""
    durations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.kind == COMPUTE:
            seconds = (event.end_nanoseconds - event.start_nanoseconds) * 1e-9
            durations.setdefault((event.machine, event.stage), []).append(seconds)
    shares = []
    for each in durations.values():
        low, middle, high = statistics.quantiles(each[len(each) // 4 :], n=4)
        shares.append((high - low) / 1.349 / middle)  # of a normal distribution, that is its standard deviation
    return statistics.median(shares)


def compared(case: Case, plan: tvm_split.Plan, report: DeploymentReport, scatter: float) -> Compared:
    prediction, scenario = plan.prediction, scenario_of_plan(plan)
    measured, latency = report.period.measured, report.latency.measured
    assert prediction is not None
    assert measured is not None
    assert latency is not None
    happenings = Happenings(compute_scatter=scatter)
    simulated = simulate(scenario, happenings)
    crowding = max((each.crowding for each in prediction.shared_cores), default=1.0)
    once_more: Simulation | None = None
    if crowding == 1.0:
        own = {each.machine: each.compute.measured for each in report.machines if each.compute.measured is not None}
        once_more = simulate(with_measured_compute(scenario, own), happenings)
    assert simulated.period_seconds is not None
    assert simulated.single is not None
    return Compared(
        case=case.name,
        crowding=crowding,
        scatter=scatter,
        measured_period=measured,
        predicted_period=prediction.period_seconds,
        simulated_period=simulated.period_seconds,
        with_measured=None if once_more is None else once_more.period_seconds,
        measured_latency=latency,
        predicted_latency=prediction.latency_seconds,
        simulated_latency=simulated.single.percentiles_seconds[50],
    )


def print_table(console: Console, results: Sequence[Compared]) -> None:
    table = Table(title="results a second, and milliseconds of one alone; ratios are to what was measured")
    table.add_column("deployment")
    for heading in (
        "scatter",
        "measured",
        "predicted",
        "simulated",
        "by measured times",
        "alone",
        "predicted",
        "simulated",
    ):
        table.add_column(heading, justify="right")
    for each in results:
        rates = [
            f"{1 / period:.1f} ({each.measured_period / period:.2f})"
            for period in (each.predicted_period, each.simulated_period)
        ]
        known = each.with_measured
        latencies = [
            f"{seconds * 1e3:.2f} ({seconds / each.measured_latency:.2f})"
            for seconds in (each.predicted_latency, each.simulated_latency)
        ]
        table.add_row(
            each.case,
            f"{each.scatter:.1%}",
            f"{1 / each.measured_period:.1f}",
            *rates,
            "" if known is None else f"{1 / known:.1f} ({each.measured_period / known:.2f})",
            f"{each.measured_latency * 1e3:.2f}",
            *latencies,
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = range(1, len(CASES) + 1)
    parser.add_argument("--case", type=int, choices=numbers, action="append", help="only this one; repeatable")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="convolutions of the network")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=150, help="of each round's stream")
    parser.add_argument("--tell", action="store_true", help="do not fail, whatever the figures are")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(140, Console().width))
    results = []
    for number in arguments.case or numbers:
        results.append(compare(CASES[number - 1], arguments.blocks, arguments.rounds, arguments.micro_batches))
        print_table(console, results[-1:])
    if len(results) > 1:
        print_table(console, results)
    written(arguments.output, {"results": [{**asdict(each), "good": each.is_good} for each in results]})
    parted = [each.case for each in results if not each.is_good]
    if parted:
        console.print(f"simulated and measured differ by more than {AIM:.0%}: {', '.join(parted)}")
    return 1 if parted and not arguments.tell else 0


if __name__ == "__main__":
    sys.exit(main())
