"""Benchmark the latency of networks whose layers are sharded over two workers of one core each.

For comparison: one worker of one core, which they should beat; one worker of two threads, whose kernels share memory,
the practical limit on two cores; and the plan for least latency.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import tvm_split
from scripts.harness import Case, Ratio, Setup, Side, median_seconds
from scripts.processes import Figures, Prepared
from scripts.sides import deployed, difference, loaded, predicted_latency, stages_text
from tvm_split import Shard

ONE_CORE, TWO_THREADS = "one worker of one core", "one worker of two threads"
SHARED, PLANNED = "shared by two workers", "as planned"
RUNS = 7
HALVES = {"machine-a": 0.5, "machine-b": 0.5}
SHARDS: dict[str, Sequence[Shard]] = {
    # By channels where weights are larger than images, since each worker then reads half of the weights.
    "vgg16": [
        Shard("features.0", "features.9", "rows", HALVES, "fused"),
        Shard("features.10", "features.16", "rows", HALVES, "each"),
        Shard("features.17", "classifier", "channels", HALVES),
    ],
    # The last images have seven rows, which cannot be halved.
    "resnet50": [
        Shard("conv1", "layer1", "rows", HALVES, "fused"),
        Shard("layer2", "layer3", "rows", HALVES, "each"),
        Shard("layer4", "fc", "channels", HALVES),
    ],
    "bert_base": [Shard("layers.0", "layers.11", "heads", HALVES)],
}


@contextmanager
def all_ways(name: str, ways: Sequence[str]) -> Iterator[Prepared]:
    _, arrays, model = loaded(name)
    whole = {"machine-a": [model.layer_names[0]]}
    with ExitStack() as until_end:
        two_workers = until_end.enter_context(tvm_split.Cluster.local(2))
        one_worker = until_end.enter_context(tvm_split.Cluster.local(1, threads=2))
        plans = {
            ONE_CORE: lambda: (two_workers, tvm_split.plan(model, two_workers, split=whole)),
            TWO_THREADS: lambda: (one_worker, tvm_split.plan(model, one_worker, split=whole)),
            SHARED: lambda: (two_workers, tvm_split.plan(model, two_workers, shards=SHARDS[name])),
            PLANNED: lambda: (two_workers, tvm_split.plan(model, two_workers, objective="latency")),
        }
        deployments, facts = {}, {}
        for way in ways:
            cluster, plan = plans[way]()
            deployments[way] = deployed(model, plan, cluster, until_end)
            off = difference(deployments[way].run(*arrays), deployments[ONE_CORE].run(*arrays))
            facts[way] = {
                "stages": stages_text(plan),
                "predicted_seconds": predicted_latency(plan),
                "difference": f"{off:.1e}",
            }

        def measure(way: str) -> Figures:
            return {"seconds": median_seconds(lambda: deployments[way].run(*arrays), RUNS)}

        yield Prepared(measure, facts)


def sides(name: str, ways: Sequence[str], setup: Setup) -> Sequence[Side]:
    return setup.sides(all_ways, name=name, ways=ways)


# Plans for least latency are subjects of their own, since profiling shards takes minutes.
WAYS = {"": (ONE_CORE, TWO_THREADS, SHARED), ", planned": (ONE_CORE, PLANNED)}

CASE = Case(
    subjects={f"{name}{text}": partial(sides, name, ways) for text, ways in WAYS.items() for name in SHARDS},
    ratios=(
        *(Ratio("seconds", ONE_CORE, side) for side in (TWO_THREADS, SHARED, PLANNED)),
        *(Ratio("seconds", side, TWO_THREADS) for side in (SHARED, PLANNED)),
    ),
)
