"""Benchmark streams over links of high latency: chains of workers with delaying relays between them.

One stage is slow, the others are quick. Tensors are small, or so large that their transfer takes nearly as long as the
slow stage. Each stream should be as fast as its slowest stage or link or, if these share cores, as the same chain
without latency.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

import tvm_split
from scripts.cases.emulated import cluster_of, deployed, links_with_relays, local_workers
from scripts.harness import Case, Limit, MakeSides, Options, Ratio, Setup, Side
from scripts.processes import Figures

FAR, NEAR = "with latency", "without"
LATENCIES_SECONDS = (0.001, 0.005, 0.02)
STAGES = (2, 6)
PIXELS = {"small": 4, "large": 64}
"""The height and width of a tensor with 8 channels in float32: 512 bytes, and 128 KiB."""
WIRE_SECONDS = 0.007
"""The time in which a relay's bandwidth carries a large tensor."""
PRODUCTS, WIDTH = 4, 768
"""The number of matrix products of the slow stage, and the width of their matrices."""
MOST_OVER = 1 / 0.95


class Slow(nn.Module):
    """A stage that returns its image slightly changed, after some milliseconds of matrix products."""

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


def streamed(deployment: tvm_split.Deployment, x: torch.Tensor, wire_seconds: float, seconds: float) -> Figures:
    """Return the period of a stream's second half, and its ratio to the time of the slowest stage or link."""
    end = time.perf_counter() + seconds

    def fed() -> Iterator[tuple[torch.Tensor]]:
        while time.perf_counter() < end:
            yield (x,)

    before = {stage.name: stage.compute_seconds for stage in deployment.stats().stages}
    arrivals = [time.perf_counter() for _ in deployment.stream(fed())]
    computing = max(stage.compute_seconds - before[stage.name] for stage in deployment.stats().stages) / len(arrivals)
    half = len(arrivals) // 2
    period = (arrivals[-1] - arrivals[half]) / (len(arrivals) - 1 - half)
    return {"period_seconds": period, "over_slowest": period / max(computing, wire_seconds)}


def sides(stages: int, tensors: str, latency_seconds: float, setup: Setup) -> Sequence[Side]:
    seconds = float(setup.options.values.get("seconds", 3.0))
    torch.manual_seed(0)
    wire_seconds = WIRE_SECONDS if tensors == "large" else 0.0
    bandwidth = 8 * 4 * PIXELS[tensors] ** 2 / WIRE_SECONDS if wire_seconds else 0.0
    x = torch.randn(1, 8, PIXELS[tensors], PIXELS[tensors])
    network = nn.Sequential(*(Slow() if index == stages // 2 else Quick() for index in range(stages))).eval()
    model = tvm_split.load_model(network, (x,))
    workers = local_workers([f"worker-{number}" for number in range(stages)], setup.until_end)
    split = {name: [str(index)] for index, name in enumerate(workers.endpoints)}
    made = []
    for name, latency in ((FAR, latency_seconds), (NEAR, 0.0)):
        wire = {"bytes_per_second": bandwidth, "latency_seconds": latency}
        links = links_with_relays(workers.endpoints, setup.until_end, **wire)
        cluster = cluster_of(workers.endpoints, links)
        deployment = deployed(model, tvm_split.plan(model, cluster, split=split), cluster, setup.until_end)
        measure = partial(streamed, deployment, x, wire_seconds, seconds)
        measure()  # warm up, so that flow-control windows grow
        made.append(Side(name, measure))
    return made


def subjects(options: Options) -> Mapping[str, MakeSides]:
    return {
        f"{stages} stages, {tensors} tensors, {latency * 1e3:g} ms": partial(sides, stages, tensors, latency)
        for stages in STAGES
        for tensors in PIXELS
        for latency in LATENCIES_SECONDS
    }


CASE = Case(
    doc="Streams over chains of workers with relays that delay, beside the slowest stage and the same without delay.",
    subjects=subjects,
    ratios=(Ratio("period_seconds", FAR, NEAR),),
    limits=(Limit("period_seconds", MOST_OVER, FAR, NEAR),),
    rounds=3,
)
