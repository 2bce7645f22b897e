"""Unequal machines and slow links, emulated on this host: is the chosen plan the best one there is?

Two workers of one core. One is held to half of its core, or the link between them to 50 Mbit/s and 10 ms, or both. The
network is a chain of blocks between which little passes, so all its plans can be measured one by one, in turns: each
cut between blocks, in either order of the machines, and either machine alone. The planner's own must reach 95 % of the
best one's throughput, and must leave MobileNetV2 on one machine where the link is slow. In the last case the two share
VGG-16's layers: shares by their speeds must beat equal ones as predicted, within 10 %. Writes JSON; fails otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.scratch import ScratchFolder
from scripts.bench_shards import SHARDS
from scripts.rounds import in_turns, medians, ratio, written
from scripts.streamed import median_run
from tests.helpers.relay import Relay
from tests.helpers.slow_machine import half_speed
from tests.models import torch_models
from tvm_split.deployment.benchmark import bench
from tvm_split.profiling.cluster_profile import profile_model
from tvm_split.progress import step_progress

NAMES = ("machine-a", "machine-b")
SLOW_CORE = 1
SLOW_LINK = {"bytes_per_second": 50e6 / 8, "latency_seconds": 0.01}
LEAST_SHARE_OF_BEST = 0.95
MICRO_BATCHES = 60
SHARES = {"equal shares": (0.5, 0.5), "shares by speed": (2 / 3, 1 / 3)}
MOST_OFF_PREDICTED = 0.1
RUNS = 5
INNER_CONVOLUTIONS = (1, 4, 2, 6, 3, 2)


class Block(nn.Module):
    """One row in, one row out, convolutions of 14 × 14 pixels in between."""

    def __init__(self, convolutions: int) -> None:
        super().__init__()
        self.expand = nn.Linear(256, 64 * 14 * 14)
        self.enter = nn.Conv2d(64, 256, 3, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(convolutions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.enter(self.expand(x).reshape(-1, 64, 14, 14)))
        for convolution in self.inner:
            y = torch.relu(convolution(y))
        return y.mean((2, 3))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count) for count in INNER_CONVOLUTIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class Case:
    """One pair of machines."""

    name: str
    slow_machine: bool
    slow_link: bool


CASES = (
    Case("one machine at half speed", True, False),
    Case("a slow link", False, True),
    Case("one machine at half speed, and a slow link", True, True),
)


@contextmanager
def cluster_of(case: Case) -> Iterator[tvm_split.Cluster]:
    """Real workers, one of them slowed down, and between the two a relay."""
    with ExitStack() as stack:
        cache = stack.enter_context(ScratchFolder("unequal"))
        workers = stack.enter_context(LocalWorkers(NAMES, threads=1, cache=cache.path))
        if case.slow_machine:
            stack.enter_context(half_speed(workers.process_ids[NAMES[1]], [SLOW_CORE]))
        links = []
        if case.slow_link:
            for source, end in (NAMES, NAMES[::-1]):
                relay = stack.enter_context(Relay(workers.endpoints[end].address, **SLOW_LINK))
                links.append(tvm_split.Link(source, end, address=relay.address))
        machines = tuple(tvm_split.Machine(name, 1, endpoint=workers.endpoints[name]) for name in NAMES)
        yield tvm_split.Cluster("remote", machines, tuple(links))


def splits() -> Iterator[dict[str, list[str]]]:
    """Every plan of the chain, as splits."""
    for first, second in (NAMES, NAMES[::-1]):
        yield {first: ["blocks"]}
        for cut in range(1, len(INNER_CONVOLUTIONS)):
            yield {first: ["blocks.0"], second: [f"blocks.{cut}"]}


def check(case: Case, console: Console, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(1, 256)
    model = tvm_split.load_model(Chain().eval(), (x,))
    with cluster_of(case) as cluster, ScratchFolder("profiles") as profiles:
        with step_progress("profiling") as report:
            profile = profile_model(model, cluster, cache_folder=profiles.path, on_progress=report).profile
        plans = [tvm_split.plan(model, cluster, profile=profile)]
        plans += [tvm_split.plan(model, cluster, split=split, profile=profile) for split in splits()]
        bundles = [tvm_split.compile(model, planned, verify=False) for planned in plans]
        periods: list[list[float]] = [[] for _ in plans]
        for number in range(rounds):
            for place in range(len(plans)):
                turn = (place + number * len(plans) // rounds) % len(plans)  # not the same one first each time
                with tvm_split.deploy(bundles[turn], cluster) as deployment:
                    measured = bench(deployment, [(x,)], rounds=1, micro_batches=MICRO_BATCHES).period.measured
                assert measured is not None
                periods[turn].append(measured)
        mobilenet = None
        if case.slow_link:
            network, inputs = torch_models.published_models()["mobilenet_v2"]
            image_model = tvm_split.load_model(network(), inputs)
            image_profile = profile_model(image_model, cluster, cache_folder=profiles.path).profile
            mobilenet = len(tvm_split.plan(image_model, cluster, profile=image_profile).stages)
    typical = [statistics.median(found) for found in periods]
    best = min(typical[1:])
    table = Table(title=case.name)
    for heading in ("stages", "per s", "predicted", "of the best"):
        table.add_column(heading, justify="left" if heading == "stages" else "right")
    for planned, period in zip(plans, typical, strict=True):
        stages = " | ".join(f"{stage.machine} {stage.layers[0]} … {stage.layers[-1]}" for stage in planned.stages)
        predicted = "" if planned.prediction is None else f"{1 / planned.prediction.period_seconds:.1f}"
        table.add_row(stages, f"{1 / period:.1f}", predicted, f"{best / period:.3f}")
    console.print(table)
    return {
        "case": case.name,
        "share_of_best": best / typical[0],
        "periods_seconds": typical,
        "mobilenet_stages": mobilenet,
    }


def shared_by(shares: Sequence[float]) -> list[tvm_split.Shard]:
    """VGG-16's layers as `bench_shards` has the two machines share them, with these shares."""
    (shards,) = SHARDS["vgg16"].values()
    return [replace(shard, shares=dict(zip(NAMES, shares, strict=True))) for shard in shards]


def check_shares(console: Console, rounds: int) -> dict[str, Any]:
    """Single inputs of VGG-16, whose layers the two machines share equally and by their speeds, in turns."""
    build, inputs = torch_models.published_models()["vgg16"]
    model = tvm_split.load_model(build(), inputs)
    arrays = tuple(each.numpy() for each in inputs)
    with ExitStack() as until_end:
        cluster = until_end.enter_context(cluster_of(CASES[0]))
        deployments, predicted = {}, {}
        for name, each in SHARES.items():
            with step_progress(f"planning {name}") as report:
                planned = tvm_split.plan(model, cluster, shards=shared_by(each), predict=True, on_progress=report)
            assert planned.prediction is not None
            predicted[name] = planned.prediction.latency_seconds
            bundle = tvm_split.compile(model, planned, verify=False)
            deployments[name] = until_end.enter_context(tvm_split.deploy(bundle, cluster))
        sides = {name: partial(median_run, each, arrays, RUNS) for name, each in deployments.items()}
        turns = in_turns(sides, rounds)
    found = {name: each["seconds"] for name, each in medians(turns).items()}
    table = Table("", "ms", "predicted", title="VGG-16's layers on two machines, one at half speed")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{predicted[name] * 1e3:.1f}")
    console.print(table)
    equal, by_speed = SHARES
    gains = ratio(turns, "seconds", equal, by_speed), predicted[equal] / predicted[by_speed]
    return {"case": "shared layers", "seconds": found, "predicted_seconds": predicted, "gain": gains}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = range(1, len(CASES) + 2)
    parser.add_argument("--case", type=int, choices=numbers, action="append", help="only this one; repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    console = Console(width=max(120, Console().width))
    results, failed = [], False
    for number in arguments.case or numbers:
        if number > len(CASES):
            result = check_shares(console, arguments.rounds)
            measured, predicted = result["gain"]
            good = abs(measured / predicted - 1) <= MOST_OFF_PREDICTED
            told = f"shares by speed {measured:.2f} times as fast as equal ones, predicted {predicted:.2f}"
        else:
            result = check(CASES[number - 1], console, arguments.rounds)
            good = result["share_of_best"] >= LEAST_SHARE_OF_BEST and result["mobilenet_stages"] in (None, 1)
            told = f"{result['share_of_best']:.3f} of the best plan"
            if result["mobilenet_stages"] is not None:
                told += f"; MobileNetV2 in {result['mobilenet_stages']} stage(s)"
        console.print(f"{'ok' if good else 'FAILED'}: {result['case']}: {told}")
        results.append(result)
        failed |= not good
    written(arguments.output, {"results": results})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
