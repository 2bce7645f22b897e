"""What splits inside layers gain for a single input: networks shared by two workers of one core each.

Beside them, one worker of one core, which they are to be faster than, and one worker of two threads, whose kernels
share memory: the practical limit on two cores; and what the planner finds for least latency, with what it predicts.
All in turns; prints medians over rounds, of ratios those within rounds, how far the outputs are from those of one
worker as a share of their range, and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import tvm_split
from scripts.rounds import Rounds, in_turns, medians, ratio, written
from scripts.streamed import median_run
from tests.models import torch_models
from tvm_split import Shard
from tvm_split.planner.problem import Stage
from tvm_split.planner.shard import sharding_words
from tvm_split.progress import step_progress

ONE_CORE, TWO_THREADS = "one worker of one core", "one worker of two threads"
PLANNED = "as planned"
RUNS = 7
HALVES = {"machine-a": 0.5, "machine-b": 0.5}
SHARDS: dict[str, dict[str, Sequence[Shard]]] = {
    "vgg16": {
        "rows, fused, then each; channels": [
            Shard("features.0", "features.9", "rows", HALVES, "fused"),
            Shard("features.10", "features.16", "rows", HALVES, "each"),
            # By channels each reads half of the weights, which are larger than the images from here on.
            Shard("features.17", "classifier", "channels", HALVES),
        ],
    },
    "resnet50": {
        "rows, fused, then each; channels": [
            Shard("conv1", "layer1", "rows", HALVES, "fused"),
            Shard("layer2", "layer3", "rows", HALVES, "each"),
            # Seven rows are no two halves.
            Shard("layer4", "fc", "channels", HALVES),
        ],
    },
    "bert_base": {"heads": [Shard("layers.0", "layers.11", "heads", HALVES)]},
}


class Contest:
    """A network on one worker of one core, on one of two threads, and shared by two of one core in several ways."""

    def __init__(self, name: str, until_end: contextlib.ExitStack) -> None:
        build, examples = torch_models.published_models()[name]
        self._inputs = tuple(each.numpy() for each in examples)
        self._model = tvm_split.load_model(build(), examples, name=name)
        self._until_end = until_end
        two = until_end.enter_context(tvm_split.Cluster.local(2))
        one = until_end.enter_context(tvm_split.Cluster.local(1, threads=2))
        first = self._model.graph.layers[0]
        with step_progress(f"planning {name}") as report:
            self.planned = tvm_split.plan(self._model, two, objective="latency", on_progress=report)
        self.deployments = {
            ONE_CORE: self._deployed(two, tvm_split.plan(self._model, two, split={"machine-a": [first]})),
            TWO_THREADS: self._deployed(one, tvm_split.plan(self._model, one, split={"machine-a": [first]})),
            **{
                way: self._deployed(two, tvm_split.plan(self._model, two, shards=shards))
                for way, shards in SHARDS[name].items()
            },
            PLANNED: self._deployed(two, self.planned),
        }

    def _deployed(self, cluster: tvm_split.Cluster, plan: tvm_split.Plan) -> tvm_split.Deployment:
        bundle = tvm_split.compile(self._model, plan, verify=False)
        return self._until_end.enter_context(tvm_split.deploy(bundle, cluster))

    def largest_difference(self) -> float:
        """Of the shared ways' outputs to those of one worker, as a share of their range."""
        right = self.deployments[ONE_CORE].run(*self._inputs)
        return max(
            float(np.abs(mine - one).max() / np.abs(one).max())
            for deployment in self.deployments.values()
            for mine, one in zip(deployment.run(*self._inputs), right, strict=True)
        )

    def measure(self, rounds: int) -> Rounds:
        sides = {
            name: partial(median_run, deployment, self._inputs, RUNS) for name, deployment in self.deployments.items()
        }
        return in_turns(sides, rounds)


def predicted_seconds(planned: tvm_split.Plan) -> float | None:
    return None if planned.prediction is None else planned.prediction.latency_seconds


def told_stage(stage: Stage) -> str:
    how = sharding_words(stage) if stage.sharding else f"on {stage.machine}"
    return f"{stage.layers[0]} … {stage.layers[-1]} {how}"


def print_results(console: Console, name: str, found: Rounds, difference: float, planned: tvm_split.Plan) -> None:
    table = Table("", "ms", "of two threads", "speed-up over one core", title=name)
    for side, each in medians(found).items():
        to_limit, gain = ratio(found, "seconds", side, TWO_THREADS), ratio(found, "seconds", ONE_CORE, side)
        table.add_row(side, f"{each['seconds'] * 1e3:.1f}", f"{to_limit:.2f}", f"{gain:.2f}")
    console.print(table)
    console.print(f"outputs differ from those of one worker by {difference:.1e} of their range")
    words, predicted = "; ".join(map(told_stage, planned.stages)), predicted_seconds(planned) or 0.0
    console.print(f"{PLANNED}: {words}; predicted {predicted * 1e3:.1f} ms")


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SHARDS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console, content = Console(), {}
    for name in arguments.models or SHARDS:
        with contextlib.ExitStack() as until_end:
            contest = Contest(name, until_end)
            difference = contest.largest_difference()
            with step_progress(f"measuring {name}"):
                found = contest.measure(arguments.rounds)
        print_results(console, name, found, difference, contest.planned)
        content[name] = {
            "difference": difference,
            "medians": medians(found),
            "rounds": found,
            "planned": [told_stage(stage) for stage in contest.planned.stages],
            "predicted_seconds": predicted_seconds(contest.planned),
        }
    written(arguments.output, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
