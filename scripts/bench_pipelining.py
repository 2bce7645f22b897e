"""ResNet-50 streamed over two workers of one core each, beside torch.distributed.pipelining over two ranks of one.

torch's pipeline runs on gloo, in inference mode and with GPipe's schedule, each part in torch's faster layout; it is
cut where its parts take most nearly the same time, warmed up, and its best number of micro-batches a step counts. The
two have different kernels; so each is put beside its own two cores computing the whole network each as well, which
leaves what pipelining costs. In turns; prints medians over rounds, of ratios those within rounds, and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import tvm_split
from scripts.partner import Partner, ask_all, module
from scripts.rounds import Figures, Rounds, in_turns, medians, ratio, two_cores, written
from scripts.streamed import Streamed
from tests.models import torch_models
from tvm_split.progress import step_progress

MODEL = "resnet50"
OURS, OUR_CORES, TORCH_CORES = "tvm-split", "tvm-split, each core the whole", "torch, each core the whole"
LARGEST_DIFFERENCE = 1e-3
"""Of outputs, as a share of their range: what different kernels of float32 may make."""


class TorchPipeline:
    """Two ranks of torch.distributed.pipelining."""

    def __init__(self, until_end: contextlib.ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = "{}:{}".format(*listener.getsockname())
        commands = [module("torch_pipeline", str(rank), address, str(core)) for rank, core in enumerate(two_cores())]
        self._ranks = [until_end.enter_context(Partner(command, OMP_NUM_THREADS="1")) for command in commands]

    def output(self) -> list[float]:
        return self._ask(1, 0.0)[-1]["output"]  # type: ignore[no-any-return]

    def stream(self, micro_batches: int, seconds: float) -> Figures:
        return {"per_second": self._ask(micro_batches, seconds)[-1]["per_second"]}

    def each_whole(self, seconds: float) -> Figures:
        return {"per_second": sum(answer["per_second"] for answer in self._ask(0, seconds))}

    def _ask(self, micro_batches: int, seconds: float) -> list[Any]:
        return ask_all(self._ranks, micro_batches=micro_batches, seconds=seconds)


def measure(seconds: float, rounds: int, micro_batches: list[int]) -> Rounds:
    build, examples = torch_models.published_models()[MODEL]
    model = tvm_split.load_model(build(), examples, name=MODEL)
    with contextlib.ExitStack() as until_end, tvm_split.Cluster.local(2) as cluster:
        ours, theirs = Streamed(model, cluster, seconds, until_end), TorchPipeline(until_end)
        (mine,) = ours.pipeline.run(*(each.numpy() for each in examples))
        difference = float(np.abs(mine - theirs.output()).max() / np.abs(mine).max())
        if difference > LARGEST_DIFFERENCE:
            sys.exit(
                f"the pipelines disagree by {difference:.1e} of their outputs' range: they compute different things"
            )
        sides = {OURS: ours.through_pipeline, OUR_CORES: ours.through_each}
        sides[TORCH_CORES] = partial(theirs.each_whole, seconds)
        for count in micro_batches:
            sides[torch_side(count)] = partial(theirs.stream, count, seconds)
        with step_progress("measuring"):
            return in_turns(sides, rounds)


def torch_side(micro_batches: int) -> str:
    return f"torch, {micro_batches} micro-batches a step"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each stream (default %(default)s)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16, 32], help="of torch's steps")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    found = measure(arguments.seconds, arguments.rounds, arguments.micro_batches)
    table = Table("", "inputs/s", title=f"{MODEL} over two cores")
    for side, each in medians(found).items():
        table.add_row(side, f"{each['per_second']:.1f}")
    console = Console()
    console.print(table)
    best = max(map(torch_side, arguments.micro_batches), key=lambda side: medians(found)[side]["per_second"])
    ratios = {
        f"tvm-split / {best}": ratio(found, "per_second", OURS, best),
        "tvm-split / its cores": ratio(found, "per_second", OURS, OUR_CORES),
        "torch / its cores": ratio(found, "per_second", best, TORCH_CORES),
    }
    for text, value in ratios.items():
        console.print(f"{text}: {value:.3f}")
    written(arguments.output, {"ratios": ratios, "medians": medians(found), "rounds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
