"""Checks that links of high latency hold no stream up: chains of workers with relays between them, which delay.

One stage computes for long, the others hardly. Tensors are small, or as large as the relay's bandwidth carries in
nearly that time. Each stream is put beside its limit, the slowest stage's mean time of computing in the same stream or
what the link takes for a tensor, and beside the same chain without a latency, in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from scripts.rounds import Figures, in_turns, medians, ratio, written
from tests.helpers.relay import Relay

LATENCIES_SECONDS = (0.001, 0.005, 0.02)
STAGES = (2, 6)
SIDES = {"small": 4, "large": 64}
"""Pixels a side of 8 channels in float32: 512 bytes, and 128 KiB."""
WIRE_SECONDS = 0.007
"""What a large tensor takes of a relay's bandwidth."""
PRODUCTS = 4
"""Of matrices, that the slow stage computes."""
WIDTH = 768
LEAST_SHARE = 0.95


class Slow(nn.Module):
    """Some milliseconds of products that the result depends on; passes an image on."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(PRODUCTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(-1)[:WIDTH].repeat(-(-WIDTH // x[0].numel()))[:WIDTH].reshape(1, WIDTH).repeat(16, 1)
        for weight in self.weights:
            y = y @ weight
        return x + y.mean() * 1e-3


class Quick(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.99


@dataclass(frozen=True)
class Case:
    stages: int
    tensors: str
    latency_seconds: float

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.tensors} tensors, {self.latency_seconds * 1e3:g} ms"


@contextmanager
def deployed(
    case: Case, workers: LocalWorkers, latency_seconds: float
) -> Iterator[tuple[tvm_split.Deployment, torch.Tensor]]:
    """The chain, its slow stage in the middle."""
    names = list(workers.endpoints)[: case.stages]
    bandwidth = 8 * 4 * SIDES[case.tensors] ** 2 / WIRE_SECONDS if case.tensors == "large" else 0.0
    x = torch.randn(1, 8, SIDES[case.tensors], SIDES[case.tensors])
    network = nn.Sequential(*(Slow() if index == case.stages // 2 else Quick() for index in range(case.stages))).eval()
    with ExitStack() as until_end:
        far = {
            end: until_end.enter_context(
                Relay(workers.endpoints[end].address, bytes_per_second=bandwidth, latency_seconds=latency_seconds)
            ).address
            for _, end in pairwise(names)
        }
        links = tuple(tvm_split.Link(source, end, address=far.get(end)) for source, end in permutations(names, 2))
        machines = tuple(tvm_split.Machine(name, 1, endpoint=workers.endpoints[name]) for name in names)
        cluster = tvm_split.Cluster(machines, links)
        model = tvm_split.load_model(network, (x,))
        split = {name: [str(index)] for index, name in enumerate(names)}
        bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split))
        yield until_end.enter_context(tvm_split.deploy(bundle, cluster)), x


def streamed(case: Case, deployment: tvm_split.Deployment, x: torch.Tensor, seconds: float) -> Figures:
    """Of the second half of a stream."""
    end = time.perf_counter() + seconds

    def fed() -> Iterator[tuple[torch.Tensor]]:
        while time.perf_counter() < end:
            yield (x,)

    before = {stage.name: stage.compute_seconds for stage in deployment.stats().stages}
    arrivals = [time.perf_counter() for _ in deployment.stream(fed())]
    computing = max(stage.compute_seconds - before[stage.name] for stage in deployment.stats().stages) / len(arrivals)
    half = len(arrivals) // 2
    period = (arrivals[-1] - arrivals[half]) / (len(arrivals) - 1 - half)
    limit = max(computing, WIRE_SECONDS if case.tensors == "large" else 0.0)
    return {"period_seconds": period, "limit_seconds": limit, "share_of_limit": limit / period}


def check(case: Case, workers: LocalWorkers, rounds: int, seconds: float) -> dict[str, float]:
    with deployed(case, workers, case.latency_seconds) as far, deployed(case, workers, 0.0) as near:
        for each in (far, near):
            streamed(case, *each, seconds)  # windows widen
        turns = in_turns(
            {"far": partial(streamed, case, *far, seconds), "near": partial(streamed, case, *near, seconds)}, rounds
        )
    found = medians(turns)
    return {
        "far_seconds": found["far"]["period_seconds"],
        "near_seconds": found["near"]["period_seconds"],
        "limit_seconds": found["far"]["limit_seconds"],
        "share_of_limit": found["far"]["share_of_limit"],
        "share_of_near": ratio(turns, "period_seconds", "near", "far"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, choices=STAGES, action="append", help="only so many; repeatable")
    parser.add_argument("--tensors", choices=SIDES, action="append", help="only these; repeatable")
    parser.add_argument("--latency", type=float, action="append", metavar="SECONDS", help="only this; repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="that each stream is fed")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    cases = [
        Case(stages, tensors, latency)
        for stages in options.stages or STAGES
        for tensors in options.tensors or SIDES
        for latency in options.latency or LATENCIES_SECONDS
    ]
    table = Table(
        "", "ms", "limit", "without latency", "of the limit", "of that without", title="Streams over far links"
    )
    results, failed = [], False
    with LocalWorkers([f"worker-{number}" for number in range(max(case.stages for case in cases))]) as workers:
        for case in cases:
            torch.manual_seed(0)
            found = check(case, workers, options.rounds, options.seconds)
            times = [f"{found[f'{key}_seconds'] * 1e3:.2f}" for key in ("far", "limit", "near")]
            table.add_row(str(case), *times, f"{found['share_of_limit']:.2f}", f"{found['share_of_near']:.2f}")
            results.append({"case": str(case), **found})
            failed |= max(found["share_of_limit"], found["share_of_near"]) < LEAST_SHARE
    Console(width=max(120, Console().width)).print(table)
    written(options.output, {"results": results})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
