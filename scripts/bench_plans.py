"""Plans against what they promised, and against how people split without a planner.

On worker processes of this host: for every network the planner's plan, the best split over all workers, one worker
alone, and the splits by equal layers, equal parameters and memory. All are deployed at the same time and measured in
turns, so that a disturbance meets all. Prints predicted and measured throughput and latency as medians over rounds, the
gains over the baselines, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

import tvm_split
from tests.models import torch_models
from tvm_split.model_profiling import profile_model
from tvm_split.planner.baselines import baseline_stages
from tvm_split.planner.model_problem import Constraints, planned_stages
from tvm_split.planning import ask
from tvm_split.progress import step_progress

MODELS = ("resnet50", "vgg16", "mobilenet_v2", "bert_base")
PLANNED = "planner"
ALL_WORKERS = "planner, all workers"
SECONDS_A_TURN = 1.5
SINGLE_RUNS = 8
WARM_UP = 3
PAUSE_SECONDS = 0.1


@dataclass
class Contestant:
    """One plan of one network and what was measured of it, a value per round."""

    name: str
    stages: str
    predicted_period_seconds: float
    predicted_latency_seconds: float
    period_seconds: list[float] = field(default_factory=list)
    latency_seconds: list[float] = field(default_factory=list)

    @property
    def period(self) -> float:
        return statistics.median(self.period_seconds)

    @property
    def latency(self) -> float:
        return statistics.median(self.latency_seconds)


def measure(contestant: Contestant, deployment: tvm_split.Deployment, inputs: tuple[torch.Tensor, ...]) -> None:
    """One turn: single runs, then a stream of which the fill does not count."""
    time.sleep(PAUSE_SECONDS)
    for _ in range(WARM_UP):
        deployment.run(*inputs)
    single = []
    for _ in range(SINGLE_RUNS):
        start = time.perf_counter()
        deployment.run(*inputs)
        single.append(time.perf_counter() - start)
    contestant.latency_seconds.append(statistics.median(single))
    count = max(20, int(SECONDS_A_TURN / contestant.predicted_period_seconds))
    filled = len(deployment.stages) * 4
    times = []
    for _ in deployment.stream(inputs for _ in range(count + filled)):
        times.append(time.perf_counter())
    contestant.period_seconds.append((times[-1] - times[filled - 1]) / (len(times) - filled))


def plans_of(model: tvm_split.Model, cluster: tvm_split.Cluster, refresh: bool) -> dict[str, tvm_split.Plan]:
    """The planner's plans and the baselines, those that are equal only once."""
    with step_progress("profiling") as report:
        profile = profile_model(model, cluster, refresh=refresh, on_progress=report)
    question = ask(model, cluster, "throughput", Constraints(), profile=profile)
    layers_of = {piece.name: len(piece.layers) for piece in profile.pieces}
    found = {PLANNED: tvm_split.plan(model, cluster, profile=profile)}
    if len(found[PLANNED].stages) < len(cluster.machines):
        found[ALL_WORKERS] = tvm_split.plan(model, cluster, stages=len(cluster.machines), profile=profile)
    for name, stages in baseline_stages(question.problem, layers_of).items():
        split = {stage.machine: stage.layers for stage in planned_stages(question.graph, profile, stages)}
        planned = tvm_split.plan(model, cluster, split=split, profile=profile)
        if all(planned.stages != other.stages for other in found.values()):
            found[name] = planned
    return found


def compare(name: str, cluster: tvm_split.Cluster, rounds: int, refresh: bool) -> list[Contestant]:
    build, inputs = torch_models.published_models()[name]
    model = tvm_split.load_model(build(), inputs)
    contestants = []
    with ExitStack() as stack:
        running = []
        for label, planned in plans_of(model, cluster, refresh).items():
            assert planned.prediction is not None
            stages = " | ".join(f"{stage.machine}: {len(stage.layers)}" for stage in planned.stages)
            contestants.append(
                Contestant(label, stages, planned.prediction.period_seconds, planned.prediction.latency_seconds)
            )
            with step_progress(f"compiling {name}") as report:
                bundle = tvm_split.compile(model, planned, verify=False, on_progress=report)
            running.append(stack.enter_context(tvm_split.deploy(bundle, cluster)))
        for _ in range(rounds):
            for contestant, deployment in zip(contestants, running, strict=True):
                measure(contestant, deployment, inputs)
    return contestants


def print_table(console: Console, name: str, contestants: list[Contestant]) -> None:
    table = Table(title=name)
    table.add_column("plan")
    table.add_column("layers by machine", overflow="fold")
    for heading in ("per s", "predicted", "ratio", "ms", "predicted", "ratio", "gain"):
        table.add_column(heading, justify="right")
    ours = contestants[0].period
    for each in contestants:
        table.add_row(
            each.name,
            each.stages,
            f"{1 / each.period:.1f}",
            f"{1 / each.predicted_period_seconds:.1f}",
            f"{each.predicted_period_seconds / each.period:.2f}",
            f"{each.latency * 1e3:.1f}",
            f"{each.predicted_latency_seconds * 1e3:.1f}",
            f"{each.predicted_latency_seconds / each.latency:.2f}",
            f"{each.period / ours:.2f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(torch_models.published_models())}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--refresh", action="store_true", help="profile anew what was profiled before")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(120, Console().width))
    results = {}
    with tvm_split.Cluster.local(arguments.workers) as cluster:
        for name in arguments.models or MODELS:
            results[name] = compare(name, cluster, arguments.rounds, arguments.refresh)
            print_table(console, name, results[name])
    everyone = [each for found in results.values() for each in found]
    planned = [found[0] for found in results.values()]
    for group, chosen in (("the planner's plans", planned), ("all plans", everyone)):
        throughput = statistics.median(abs(each.period / each.predicted_period_seconds - 1) for each in chosen)
        latency = statistics.median(abs(each.predicted_latency_seconds / each.latency - 1) for each in chosen)
        console.print(f"median error over {group}: throughput {throughput:.1%}, latency {latency:.1%}")
    worst = min(each.period / found[0].period for found in results.values() for each in found)
    console.print(f"the planner's throughput is at least {worst:.3f} of every other plan's")
    if arguments.output:
        content = {name: [asdict(each) for each in found] for name, found in results.items()}
        arguments.output.write_text(json.dumps(content, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
