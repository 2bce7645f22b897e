"""Check, on emulated unequal machines and slow links, whether the planner's plan is the best plan of a chain."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import nn

import tvm_split
from scripts.cases.shards import SHARDS
from scripts.harness import BEST, Case, Limit, Ratio, Setup, Side
from scripts.processes import Figures
from scripts.sides import (
    cluster_of,
    deployed,
    links_with_relays,
    loaded,
    local_workers,
    predicted_latency,
    stages_text,
    timed,
)
from tests.helpers.slow_machine import half_speed

NAMES = ("machine-a", "machine-b")
PLANNED = "planned"
SLOW_CORE = 1
SLOW_LINK = {"bytes_per_second": 50e6 / 8, "latency_seconds": 0.01}
MICRO_BATCHES = 60
CASES = {
    "one machine at half speed": (True, False),
    "a slow link": (False, True),
    "one machine at half speed, and a slow link": (True, True),
}
"""The cases: whether the second machine is slow, and whether the link is slow."""
EQUAL, BY_SPEED = "equal shares", "shares by speed"
SHARES = {EQUAL: (0.5, 0.5), BY_SPEED: (2 / 3, 1 / 3)}
INNER_CONVOLUTIONS = (1, 4, 2, 6, 3, 2)
MOST_OVER_BEST = 1 / 0.95


class Block(nn.Module):
    """A layer with vectors as input and output, and convolutions of 14 × 14 pixels between them."""

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


def machines(is_slow: bool, has_slow_link: bool, until_end: ExitStack) -> tvm_split.Cluster:
    """Start two workers; the second one is slowed down if ``is_slow``, and a relay is the link if ``has_slow_link``."""
    workers = local_workers(NAMES, until_end)
    if is_slow:
        until_end.enter_context(half_speed(workers.process_ids[NAMES[1]], [SLOW_CORE]))
    links = links_with_relays(workers.endpoints, until_end, **SLOW_LINK) if has_slow_link else ()
    return cluster_of(workers.endpoints, links)


def splits() -> Iterator[dict[str, list[str]]]:
    for first, second in (NAMES, NAMES[::-1]):
        yield {first: ["0"]}
        for cut in range(1, len(INNER_CONVOLUTIONS)):
            yield {first: ["0"], second: [str(cut)]}


def _period(model: tvm_split.Model, bundle: tvm_split.Bundle, cluster: tvm_split.Cluster) -> Figures:
    with tvm_split.deploy(bundle, cluster) as deployment:
        report = tvm_split.bench(deployment, [model.example_inputs], rounds=1, micro_batches=MICRO_BATCHES)
    return {"period_seconds": report.period.measured or float("nan")}


def all_plans(is_slow: bool, has_slow_link: bool, setup: Setup) -> Sequence[Side]:
    torch.manual_seed(0)
    chain = nn.Sequential(*map(Block, INNER_CONVOLUTIONS)).eval()
    model = tvm_split.load_model(chain, (torch.randn(1, 256),))
    cluster = machines(is_slow, has_slow_link, setup.until_end)
    plans = {PLANNED: tvm_split.plan(model, cluster, refresh=True)}
    for split in splits():
        plan = tvm_split.plan(model, cluster, split=split)
        plans[stages_text(plan)] = plan
    all_sides = []
    for name, plan in plans.items():
        bundle = tvm_split.compile(model, plan, verify=False)
        facts = {"stages": stages_text(plan), "predicted_seconds": plan.prediction and plan.prediction.period_seconds}
        all_sides.append(Side(name, partial(_period, model, bundle, cluster), facts if name == PLANNED else {}))
    return all_sides


def shares(setup: Setup) -> Sequence[Side]:
    """Return sides for single inputs of VGG-16, sharded over both machines equally or in proportion to their speeds."""
    _, arrays, model = loaded("vgg16")
    cluster = machines(True, False, setup.until_end)
    all_sides = []
    for name, parts in SHARES.items():
        shards = [replace(shard, shares=dict(zip(NAMES, parts, strict=True))) for shard in SHARDS["vgg16"]]
        plan = tvm_split.plan(model, cluster, shards=shards, predict=True)
        deployment = deployed(model, plan, cluster, setup.until_end)
        facts = {"predicted_seconds": predicted_latency(plan)}
        all_sides.append(Side(name, timed(partial(deployment.run, *arrays)), facts))
    return all_sides


CASE = Case(
    subjects={**{name: partial(all_plans, *kinds) for name, kinds in CASES.items()}, "shared layers": shares},
    ratios=(Ratio("seconds", EQUAL, BY_SPEED),),
    limits=(Limit("period_seconds", MOST_OVER_BEST, PLANNED, BEST), Limit("seconds", 1.0, BY_SPEED, EQUAL)),
    rounds=3,
)
