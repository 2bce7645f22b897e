"""Over links that the kernel shapes, between network namespaces: is the plan's choice the fastest one?

Two workers of one core, each in a namespace of its own (as root). Over 100 Mbit/s every codec that is allowed is timed,
with and without loss, beside the one that the plan chose. Over 1 Gbit/s and 100 Mbit/s VGG-16 gives a single input on
one machine, as a pipeline, with fused tiles and with an exchange after each layer, beside the plan for least latency.
All in turns; the bytes that workers sent each other are those that they counted. Writes JSON; fails where a choice took
longer than `TOLERANCE` times the best, where it lost what it may not, or where fused tiles sent more than a fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

import tvm_split
from rpc_runtime.program.codec import Codec, fits
from rpc_runtime.program.program import RouteCodec
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.scratch import ScratchFolder
from scripts.bench_shards import HALVES, predicted_seconds, told_stage
from scripts.rounds import Figures, in_turns, medians, written
from scripts.streamed import median_run
from tests.helpers.shaped_network import can_shape, shaped_workers
from tests.helpers.smooth_network import CUT, smooth_network
from tests.models import torch_models
from tvm_split import Shard
from tvm_split.progress import step_progress

NAMES = tuple(HALVES)
MEGABIT = 1e6
CODEC_BITS_PER_SECOND = 100 * MEGABIT
SHARD_BITS_PER_SECOND = (1000 * MEGABIT, 100 * MEGABIT)
ALLOWED_LOSS = 0.05
FIRST_LAYERS = ("features.0", "features.9")
TOLERANCE = 1.1
FEWER_BYTES = 5
FILL = 4
MICRO_BATCHES = 16
RUNS = 3
PLANNED = "the plan for least latency"


@contextlib.contextmanager
def cluster_of(bits_per_second: float, **link: Any) -> Iterator[tvm_split.Cluster]:
    """Two workers; ``link`` is said of the links between them."""
    with (
        ScratchFolder("shaped") as cache,
        shaped_workers(NAMES, bits_per_second, cache.path) as (endpoints, _),
    ):
        machines = tuple(tvm_split.Machine(name, 1, endpoint=endpoint) for name, endpoint in endpoints.items())
        links = (tvm_split.Link(*NAMES, **link),) if link else ()
        yield tvm_split.Cluster("remote", machines, links)


def seconds_apart(deployment: tvm_split.Deployment, inputs: Sequence[Any]) -> Figures:
    """Between results of a stream."""
    times = [time.perf_counter() for _ in deployment.stream([inputs] * MICRO_BATCHES)]
    return {"seconds": (times[-1] - times[FILL]) / (len(times) - 1 - FILL)}


def check_codecs(console: Console, allow_lossy: float, rounds: int) -> dict[str, Any]:
    network, image = smooth_network()
    split = dict(zip(NAMES, CUT, strict=True))
    model = tvm_split.load_model(network, (image,))
    with contextlib.ExitStack() as until_end:
        cluster = until_end.enter_context(cluster_of(CODEC_BITS_PER_SECOND, codec="auto"))
        planned = tvm_split.plan(model, cluster, split=split, allow_lossy=allow_lossy)
        between = [each for each in planned.codecs if (each.source, each.destination) == NAMES]
        chosen = between[0].codec if between else Codec.NONE
        bundle = tvm_split.compile(model, planned)
        (route,) = [each for each in bundle.program.routes if (each.source, each.destination) == NAMES]
        deployments = {}
        for codec in Codec:
            if fits(codec, route.tensor) and (allow_lossy or not codec.is_lossy):
                program = replace(bundle.program, codecs=(RouteCodec(route.tensor.name, *NAMES, codec),))
                deployments[codec.value] = until_end.enter_context(
                    tvm_split.deploy(replace(bundle, program=program), cluster)
                )
        sides = {name: partial(seconds_apart, each, (image,)) for name, each in deployments.items()}
        found = medians(in_turns(sides, rounds))
    title = f"codecs over 100 Mbit/s, {f'up to {allow_lossy:.0%} lost' if allow_lossy else 'lossless'}"
    result = printed(console, title, {name: each["seconds"] for name, each in found.items()}, chosen.value)
    return {**result, "good": result["good"] and (allow_lossy > 0 or not chosen.is_lossy)}


def shard_ways() -> dict[str, Sequence[Shard]]:
    return {
        "fused tiles": [Shard(*FIRST_LAYERS, "rows", HALVES, "fused")],
        "exchange per layer": [
            Shard("features.0", "features.30", "rows", HALVES, "each"),
            Shard("flatten", "classifier", "channels", HALVES),
        ],
    }


def check_shards(console: Console, bits_per_second: float, rounds: int) -> dict[str, Any]:
    build, inputs = torch_models.published_models()["vgg16"]
    model = tvm_split.load_model(build(), inputs)
    first = model.graph.layers[0]
    with contextlib.ExitStack() as until_end:
        cluster = until_end.enter_context(cluster_of(bits_per_second))
        with step_progress("planning") as report:
            plans = {
                "one machine": tvm_split.plan(model, cluster, split={NAMES[0]: [first]}),
                "pipeline": tvm_split.plan(model, cluster, stages=2, on_progress=report),
                **{name: tvm_split.plan(model, cluster, shards=shards) for name, shards in shard_ways().items()},
                PLANNED: tvm_split.plan(model, cluster, objective="latency", on_progress=report),
            }
        deployments = {
            name: until_end.enter_context(tvm_split.deploy(tvm_split.compile(model, each, verify=False), cluster))
            for name, each in plans.items()
        }
        arrays = tuple(each.numpy() for each in inputs)
        sides = {name: partial(median_run, each, arrays, RUNS) for name, each in deployments.items()}
        with step_progress("measuring"):
            found = medians(in_turns(sides, rounds))
    title = f"VGG-16, one input, over {bits_per_second / MEGABIT:.0f} Mbit/s"
    result = printed(console, title, {name: each["seconds"] for name, each in found.items()}, PLANNED)
    words = [told_stage(stage) for stage in plans[PLANNED].stages]
    predicted = predicted_seconds(plans[PLANNED])
    console.print(f"{PLANNED}: {'; '.join(words)}; predicted {(predicted or 0) * 1e3:.1f} ms")
    return {**result, "plan": words, "predicted_seconds": predicted}


def check_bytes(console: Console) -> dict[str, Any]:
    """What workers send each other for VGG-16's first layers, shared by rows in both ways."""
    build, inputs = torch_models.published_models()["vgg16"]
    network = build()
    last = int(FIRST_LAYERS[1].split(".")[1])
    network = nn.Sequential(*list(network.features)[: last + 1]).eval()
    model = tvm_split.load_model(network, inputs)
    counted = {}
    with cluster_of(SHARD_BITS_PER_SECOND[0]) as cluster:
        for exchange in ("fused", "each"):
            shard = Shard(model.graph.layers[0], model.graph.layers[-1], "rows", HALVES, exchange)
            bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, shards=[shard]), verify=False)
            (result,) = [each.tensor for each in bundle.program.routes if each.destination == CLIENT]
            # One machine gives it to the client, and gets the other's half of it first, whatever is exchanged before.
            collected = result.size_bytes + int(result.size_bytes * HALVES[NAMES[1]])
            with tvm_split.deploy(bundle, cluster) as deployment:
                deployment.run(*(each.numpy() for each in inputs))
                sent = sum(stage.bytes_sent for stage in deployment.stats().stages)
            counted[exchange] = sent - collected
    console.print(
        f"VGG-16's layers {' to '.join(FIRST_LAYERS)}, shared by rows: before their result is collected workers sent "
        f"each other {counted['fused']:,} bytes with fused tiles, {counted['each']:,} with an exchange after each layer"
    )
    return {"bytes": counted, "good": counted["fused"] * FEWER_BYTES <= counted["each"]}


def printed(console: Console, title: str, seconds: Mapping[str, float], chosen: str) -> dict[str, Any]:
    """A table of the ways; what was found, and whether the chosen one is good."""
    best = min(seconds.values())
    table = Table("", "ms", "of the best", title=title)
    for name, each in seconds.items():
        table.add_row(f"{name}{' (chosen)' if name == chosen else ''}", f"{each * 1e3:.1f}", f"{each / best:.2f}")
    console.print(table)
    return {"seconds": seconds, "chosen": chosen, "good": seconds[chosen] <= TOLERANCE * best}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("codecs", "bytes", "shards"), help="this part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if not can_shape():
        sys.exit("links are shaped as root, with `ip` and `tc` of iproute2; use scripts.check_unequal without them")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else namespaces would stay
    console, results = Console(), {}
    if arguments.only in (None, "codecs"):
        for allow_lossy in (0.0, ALLOWED_LOSS):
            results[f"codecs, {allow_lossy:g} lost"] = check_codecs(console, allow_lossy, arguments.rounds)
    if arguments.only in (None, "bytes"):
        results["bytes of shared layers"] = check_bytes(console)
    if arguments.only in (None, "shards"):
        for bits_per_second in SHARD_BITS_PER_SECOND:
            key = f"shards, {bits_per_second:.0f} bit/s"
            results[key] = check_shards(console, bits_per_second, arguments.rounds)
    for name, result in results.items():
        console.print(f"{'ok' if result['good'] else 'FAILED'}: {name}")
    written(arguments.output, results)
    return 0 if all(result["good"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
