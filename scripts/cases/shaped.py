"""Check, over links with limited bandwidth, whether the plan's choice of codec or split is the fastest.

The kernel shapes the links between network namespaces. Two workers of one core each have a namespace of their own.
Needs root, `ip` and `tc`.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import tvm_split
from rpc_runtime.program.codecs import CODECS, NONE
from rpc_runtime.program.program import RouteCodec
from rpc_runtime.scratch import ScratchFolder
from scripts.cases.shards import HALVES
from scripts.harness import BEST, Case, Limit, Setup, Side
from scripts.processes import Figures
from scripts.sides import cluster_of, deployed, loaded, predicted_latency, stages_text, timed
from tests.helpers.shaped_network import shaped_workers
from tests.helpers.smooth_network import CUT, smooth_network
from tvm_split import Shard

NAMES = (FIRST, SECOND) = tuple(HALVES)
MEGABIT = 1e6
ALLOWED_LOSS = 0.05
CHOSEN, PLANNED = "chosen", "the plan for least latency"
FILL, MICRO_BATCHES = 4, 16
MOST_OVER_BEST = 1.1
SHARED = {
    "fused tiles": [Shard("features.0", "features.9", "rows", HALVES, "fused")],
    "exchange after each layer": [
        Shard("features.0", "features.30", "rows", HALVES, "each"),
        Shard("flatten", "classifier", "channels", HALVES),
    ],
}


def machines(bits_per_second: float, until_end: ExitStack, **link: Any) -> tvm_split.Cluster:
    cache = until_end.enter_context(ScratchFolder("shaped"))
    endpoints, _ = until_end.enter_context(shaped_workers(NAMES, bits_per_second, cache.path))
    return cluster_of(endpoints, [tvm_split.Link(FIRST, SECOND, **link)] if link else [])


def _period(deployment: tvm_split.Deployment, inputs: Sequence[Any]) -> Figures:
    times = [time.perf_counter() for _ in deployment.stream([inputs] * MICRO_BATCHES)]
    return {"period_seconds": (times[-1] - times[FILL]) / (len(times) - 1 - FILL)}


def codecs(allow_lossy: float, setup: Setup) -> Sequence[Side]:
    """Return a side for every allowed codec over 100 Mbit/s; the side of the planner's codec is named `CHOSEN`."""
    module, image = smooth_network()
    model = tvm_split.load_model(module, (image,))
    cluster = machines(100 * MEGABIT, setup.until_end, codec="auto")
    plan = tvm_split.plan(model, cluster, split=dict(zip(NAMES, CUT, strict=True)), allow_lossy=allow_lossy)
    between = [codec.codec for codec in plan.codecs if (codec.source, codec.destination) == NAMES]
    bundle = tvm_split.compile(model, plan)
    (route,) = [route for route in bundle.program.routes if (route.source, route.destination) == NAMES]
    all_sides = []
    for codec in CODECS:
        if not CODECS[codec](route.tensor).unfit and (allow_lossy or not CODECS[codec].is_lossy):
            program = replace(bundle.program, codecs=(RouteCodec(route.tensor.name, FIRST, SECOND, codec),))
            deployment = setup.until_end.enter_context(tvm_split.deploy(replace(bundle, program=program), cluster))
            is_chosen = codec == (between[0] if between else NONE)
            all_sides.append(
                Side(CHOSEN if is_chosen else codec, partial(_period, deployment, (image,)), {"codec": codec})
            )
    return all_sides


def splits(bits_per_second: float, setup: Setup) -> Sequence[Side]:
    """Return sides for one input of VGG-16: one machine, a pipeline, two ways of sharding, and the plan for latency."""
    _, arrays, model = loaded("vgg16")
    cluster = machines(bits_per_second, setup.until_end)
    plans = {
        "one machine": tvm_split.plan(model, cluster, split={NAMES[0]: [model.layer_names[0]]}),
        "pipeline": tvm_split.plan(model, cluster, stages=2),
        **{name: tvm_split.plan(model, cluster, shards=shards) for name, shards in SHARED.items()},
        PLANNED: tvm_split.plan(model, cluster, objective="latency"),
    }
    return [
        Side(
            name,
            timed(partial(deployed(model, plan, cluster, setup.until_end).run, *arrays)),
            {"stages": stages_text(plan), "predicted_seconds": predicted_latency(plan)} if name == PLANNED else {},
        )
        for name, plan in plans.items()
    ]


CASE = Case(
    subjects={
        "codecs, lossless": partial(codecs, 0.0),
        f"codecs, {ALLOWED_LOSS:.0%} lost": partial(codecs, ALLOWED_LOSS),
        "splits, 1 Gbit/s": partial(splits, 1000 * MEGABIT),
        "splits, 100 Mbit/s": partial(splits, 100 * MEGABIT),
    },
    limits=(
        Limit("period_seconds", MOST_OVER_BEST, CHOSEN, BEST),
        Limit("seconds", MOST_OVER_BEST, PLANNED, BEST),
    ),
    rounds=3,
    needs=("root",),
)
