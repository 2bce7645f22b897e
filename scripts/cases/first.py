"""Benchmark the time from a network in memory to its first result, in a new process with empty caches."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from scripts.harness import Case, Setup, Side
from scripts.processes import Checkout, Figures, Prepared

OURS = "tvm-split"
NETWORKS = ("mobilenet_v2", "resnet50", "bert_base")
WAYS = ("planned", "one worker, by hand")


@contextmanager
def first_result(name: str, is_planned: bool) -> Iterator[Prepared]:
    """Plan, compile and deploy on two local workers; without ``is_planned``, all layers are on the first worker."""

    def measure() -> Figures:
        start = time.perf_counter()
        import tvm_split

        imported = time.perf_counter()
        from scripts.sides import network

        module, inputs = network(name)
        begin = time.perf_counter()
        first = next(name for name, _ in module.named_children())
        split = None if is_planned else {"machine-a": [first]}
        cluster = tvm_split.Cluster.local(2)
        with tvm_split.compile_and_deploy(module, inputs, cluster, split) as deployment:
            deployment.run(*(tensor.numpy() for tensor in inputs))
            return {"import_seconds": imported - start, "first_result_seconds": time.perf_counter() - begin}

    yield Prepared(measure)


def _measure(setup: Setup, checkout: Checkout, **arguments: Any) -> Figures:
    """Measure in a new process with an empty cache of profiles and blobs."""
    with tempfile.TemporaryDirectory() as cache:
        process = setup.begin(first_result, checkout, {"TVM_SPLIT_CACHE": cache}, **arguments)
        process.ready()
        figures = process.measure()
        process.close()
        return figures


def sides(name: str, way: str, setup: Setup) -> Sequence[Side]:
    arguments = {"name": name, "is_planned": way == WAYS[0]}
    return [
        Side(OURS, partial(_measure, setup, checkout, **arguments), checkout=checkout.label)
        for checkout in setup.checkouts
    ]


CASE = Case(
    doc="Seconds from `compile_and_deploy` to the first result, in new processes with empty caches.",
    subjects={f"{name}, {way}": partial(sides, name, way) for name in NETWORKS for way in WAYS},
    rounds=3,
)
