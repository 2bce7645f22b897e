"""Plans against what they promised, and against how people split without a planner.

On worker processes of this host: for every network the planner's plan, the best split over all workers, one worker
alone, and the splits by equal layers, equal parameters and memory. They are deployed and measured in turns, and every
round profiles the machines anew, so that a prediction and what it is compared with meet the same machine. Prints
medians over rounds, of predictions the median of the rounds' ratios, and the gains over the baselines; writes JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tvm_split
from scripts.rounds import rotated, written
from tests.models import torch_models
from tvm_split.deployment.benchmark import bench
from tvm_split.deployment.report_values import Comparison
from tvm_split.planner.baselines import baseline_stages
from tvm_split.planner.build_problem import stages_of_layers
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.request import PlanRequest
from tvm_split.posing import pose, predict_stages
from tvm_split.profiling.cluster_profile import ModelProfiler, profile_model
from tvm_split.progress import step_progress

MODELS = ("resnet50", "vgg16", "mobilenet_v2", "bert_base")
PLANNED = "planner"
ALL_WORKERS = "planner, all workers"
SECONDS_A_TURN = 1.5


@dataclass
class Contestant:
    """One plan of one network, and what was predicted and measured of it, a value per round."""

    name: str
    plan: tvm_split.Plan
    bundle: tvm_split.Bundle
    periods: list[Comparison] = field(default_factory=list)
    latencies: list[Comparison] = field(default_factory=list)

    @property
    def period(self) -> float:
        """Seconds, the median over rounds."""
        return statistics.median(each.measured or 0.0 for each in self.periods)

    @property
    def latency(self) -> float:
        return statistics.median(each.measured or 0.0 for each in self.latencies)

    @property
    def period_ratio(self) -> float:
        """Measured by predicted, the median of the rounds' ratios."""
        return statistics.median(each.ratio or 0.0 for each in self.periods)

    @property
    def latency_ratio(self) -> float:
        return statistics.median(each.ratio or 0.0 for each in self.latencies)


class Contest:
    """The plans of one network on one cluster."""

    def __init__(self, name: str, cluster: tvm_split.Cluster) -> None:
        build, self._inputs = torch_models.published_models()[name]
        self._model = tvm_split.load_model(build(), self._inputs)
        self._cluster = cluster
        self._profiler = ModelProfiler(self._model)
        with step_progress(f"planning {name}"):
            plans = self._plans(self._profile())
        self.contestants = []
        for label, planned in plans.items():
            with step_progress(f"compiling {name}, {label}") as report:
                bundle = tvm_split.compile(self._model, planned, verify=False, on_progress=report)
            self.contestants.append(Contestant(label, planned, bundle))

    def round(self, number: int) -> None:
        """Profile the machines, then measure every plan once; in each round another one is the first."""
        profile = self._profile()
        for each in rotated(self.contestants, number):
            predicted = predict_stages(self._model, self._cluster, profile, "throughput", each.plan.stages)
            assert predicted is not None
            with tvm_split.deploy(each.bundle, self._cluster) as deployment:
                count = max(20, int(SECONDS_A_TURN / predicted.period_seconds))
                report = bench(deployment, [self._inputs], rounds=1, micro_batches=count)
            each.periods.append(Comparison(predicted.period_seconds, report.period.measured))
            each.latencies.append(Comparison(predicted.latency_seconds, report.latency.measured))

    def _profile(self) -> ClusterProfile:
        return profile_model(self._model, self._cluster, profiler=self._profiler, refresh=True).profile

    def _plans(self, profile: ClusterProfile) -> dict[str, tvm_split.Plan]:
        """The planner's plans and the baselines, those that are equal only once."""
        posed = pose(self._model, self._cluster, PlanRequest(profile=profile))
        layers_of = {piece.name: len(piece.layers) for piece in profile.pieces}
        found = {PLANNED: tvm_split.plan(self._model, self._cluster, profile=profile)}
        workers = len(self._cluster.machines)
        if len(found[PLANNED].stages) < workers:
            found[ALL_WORKERS] = tvm_split.plan(self._model, self._cluster, stages=workers, profile=profile)
        for name, stages in baseline_stages(posed.problem, layers_of).items():
            split = {stage.machine: stage.layers for stage in stages_of_layers(self._model.graph, profile, stages)}
            planned = tvm_split.plan(self._model, self._cluster, split=split)
            if all(planned.stages != other.stages for other in found.values()):
                found[name] = planned
        return found


def print_table(console: Console, name: str, contestants: Sequence[Contestant]) -> None:
    table = Table(title=name)
    table.add_column("plan")
    table.add_column("layers by machine", overflow="fold")
    for heading in ("per s", "measured / predicted", "ms", "measured / predicted", "planner's gain"):
        table.add_column(heading, justify="right")
    for each in contestants:
        table.add_row(
            each.name,
            " | ".join(f"{stage.machine}: {len(stage.layers)}" for stage in each.plan.stages),
            f"{1 / each.period:.1f}",
            f"{each.period_ratio:.2f}",
            f"{each.latency * 1e3:.1f}",
            f"{each.latency_ratio:.2f}",
            f"{each.period / contestants[0].period:.2f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(torch_models.published_models())}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(120, Console().width))
    results: dict[str, list[Contestant]] = {}
    with tvm_split.Cluster.local(arguments.workers) as cluster:
        for name in arguments.models or MODELS:
            contest = Contest(name, cluster)
            for number in range(arguments.rounds):
                contest.round(number)
            results[name] = contest.contestants
            print_table(console, name, contest.contestants)
    summary = summary_of(results)
    for text, value in summary.items():
        console.print(f"{text}: {value:.3f}")
    content = {name: [described(each) for each in found] for name, found in results.items()}
    written(arguments.output, {"summary": summary, "models": content})
    return 0


def summary_of(results: Mapping[str, Sequence[Contestant]]) -> dict[str, float]:
    """Medians over networks of how far predictions are off, and the least gain over another plan."""
    groups = {
        "the planner's plans": [found[0] for found in results.values()],
        "all plans": [each for found in results.values() for each in found],
    }
    summary = {}
    for group, chosen in groups.items():
        for what in ("period", "latency"):
            errors = [abs(1 / getattr(each, f"{what}_ratio") - 1) for each in chosen]
            summary[f"{what}, median error of {group}"] = statistics.median(errors)
    summary["least gain of the planner over another plan"] = min(
        each.period / found[0].period for found in results.values() for each in found
    )
    return summary


def described(contestant: Contestant) -> dict[str, Any]:
    return {
        "plan": contestant.name,
        "stages": [{"machine": stage.machine, "layers": len(stage.layers)} for stage in contestant.plan.stages],
        "periods": [{**asdict(each), "ratio": each.ratio} for each in contestant.periods],
        "latencies": [{**asdict(each), "ratio": each.ratio} for each in contestant.latencies],
    }


if __name__ == "__main__":
    sys.exit(main())
