"""Benchmark the time from a network in memory to its first result: with empty caches, then once more."""

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
WAYS = {"throughput": NETWORKS, "latency": (*NETWORKS, "vgg16"), "one worker, by hand": NETWORKS}
"""What is planned for, or that nothing is planned, and the networks."""


@contextmanager
def first_result(name: str, way: str) -> Iterator[Prepared]:
    """Plan, compile and deploy on two local workers; by hand, all layers are on the first worker."""

    def measure() -> Figures:
        start = time.perf_counter()
        import tvm_split

        imported = time.perf_counter()
        from scripts.sides import network

        module, inputs = network(name)
        begin = time.perf_counter()
        first = next(name for name, _ in module.named_children())
        how: Any = {"split": {"machine-a": [first]}} if "by hand" in way else {"objective": way}
        with tvm_split.compile_and_deploy(module, inputs, tvm_split.Cluster.local(2), **how) as deployment:
            deployment.run(*(tensor.numpy() for tensor in inputs))
            return {"import_seconds": imported - start, "seconds": time.perf_counter() - begin}

    yield Prepared(measure)


def _measure(setup: Setup, checkout: Checkout, **arguments: Any) -> Figures:
    """Measure in a new process with an empty cache, and in a second one with what the first one kept."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        for when in ("first", "again"):
            process = setup.begin(first_result, checkout, {"TVM_SPLIT_CACHE": cache}, **arguments)
            process.ready()
            figures |= {f"{when}_{name}": value for name, value in process.measure().items()}
            process.close()
    return figures


def sides(name: str, way: str, setup: Setup) -> Sequence[Side]:
    return [
        Side(OURS, partial(_measure, setup, checkout, name=name, way=way), checkout=checkout.label)
        for checkout in setup.checkouts
    ]


CASE = Case(
    subjects={f"{name}, {way}": partial(sides, name, way) for way, networks in WAYS.items() for name in networks},
    rounds=3,
)
