"""What a second core gains: networks streamed over two workers of one core each, beside other ways to use two cores.

The pipeline is split as the planner splits it for throughput. Beside it: its slowest stage's own computing, which
no overlap can beat; two workers that compute the whole network each, at the same time, on inputs of their own; one of
them alone; and onnxruntime on both cores. For a single input, ``run`` on one worker beside the same in this process:
what a worker's process costs. All in turns; prints medians over rounds, of ratios those within rounds, and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import tvm_split
from scripts.bench_plans import MODELS
from scripts.partner import Partner, ask_all, module
from scripts.rounds import Figures, Rounds, in_turns, medians, ratio, two_cores, written
from scripts.streamed import Streamed, median_run
from tests.models import torch_models
from tvm_split.progress import step_progress

PIPELINE, ALONE, BOTH = "pipeline of two workers", "one worker", "two workers, each the whole"
ONE_SESSION, TWO_SESSIONS = "onnxruntime, one session of two threads", "onnxruntime, two sessions of one thread"
ONE_RUN, IN_PROCESS = "run on one worker", "run in this process"


class Contest:
    """Everything that computes one network."""

    def __init__(
        self, name: str, cluster: tvm_split.Cluster, folder: Path, seconds: float, until_end: contextlib.ExitStack
    ) -> None:
        build, examples = torch_models.published_models()[name]
        network = build()
        self._inputs = [each.numpy() for each in examples]
        self._seconds = seconds
        model = tvm_split.load_model(network, examples, name=name)
        self._streamed = Streamed(model, cluster, seconds, until_end)
        here = tvm_split.Cluster.in_process(1, threads=1)
        bundle = tvm_split.compile(model, tvm_split.plan(model, here), verify=False)
        self._here = until_end.enter_context(tvm_split.deploy(bundle, here))
        path, inputs, cores = folder / f"{name}.onnx", folder / f"{name}.npz", two_cores()
        torch.onnx.export(network, examples, str(path), dynamo=False)
        np.savez(inputs, *self._inputs)

        def session(threads: int, *own: int) -> Partner:
            command = module("onnxruntime_session", str(path), str(inputs), str(threads), ",".join(map(str, own)))
            return until_end.enter_context(Partner(command))

        self._one_session, self._two_sessions = session(2, *cores), [session(1, core) for core in cores]

    def measure(self, rounds: int) -> Rounds:
        return in_turns(
            {
                PIPELINE: self._streamed.through_pipeline,
                ALONE: self._streamed.through_one,
                BOTH: self._streamed.through_each,
                ONE_SESSION: partial(self._one_session.ask, seconds=self._seconds),
                TWO_SESSIONS: self._sessions,
                ONE_RUN: partial(median_run, self._streamed.wholes[0], self._inputs),
                IN_PROCESS: partial(median_run, self._here, self._inputs),
            },
            rounds,
        )

    def _sessions(self) -> Figures:
        return {"per_second": sum(each["per_second"] for each in ask_all(self._two_sessions, seconds=self._seconds))}


def ratios_of(found: Rounds) -> dict[str, float]:
    """The medians of the rounds' ratios; onnxruntime's is to its better way."""
    better = max((ONE_SESSION, TWO_SESSIONS), key=lambda name: medians(found)[name]["per_second"])
    return {
        "pipeline / limit of its slowest stage": medians(found)[PIPELINE]["share_of_limit"],
        "pipeline / one worker": ratio(found, "per_second", PIPELINE, ALONE),
        "pipeline / two workers, each the whole": ratio(found, "per_second", PIPELINE, BOTH),
        f"pipeline / {better}": ratio(found, "per_second", PIPELINE, better),
        "seconds of a run, one worker / in process": ratio(found, "seconds", ONE_RUN, IN_PROCESS),
    }


def print_results(console: Console, name: str, found: Rounds) -> None:
    table = Table("", "inputs/s", "ms", title=name)
    for side, each in medians(found).items():
        per_second = f"{each['per_second']:.1f}" if "per_second" in each else ""
        table.add_row(side, per_second, f"{each['seconds'] * 1e3:.2f}" if "seconds" in each else "")
    console.print(table)
    for text, value in ratios_of(found).items():
        console.print(f"{text}: {value:.3f}")


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(torch_models.published_models())}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each stream (default %(default)s)")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console, content = Console(), {}
    for name in arguments.models or MODELS:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.ExitStack() as until_end,
            tvm_split.Cluster.local(2) as cluster,
        ):
            contest = Contest(name, cluster, Path(folder), arguments.seconds, until_end)
            with step_progress(f"measuring {name}"):
                found = contest.measure(arguments.rounds)
        print_results(console, name, found)
        content[name] = {"ratios": ratios_of(found), "medians": medians(found), "rounds": found}
    written(arguments.output, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
