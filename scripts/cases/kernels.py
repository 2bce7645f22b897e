"""Benchmark single inputs on one machine: this project's kernels, onnxruntime, torch and TVM's default build.

``--set database=FOLDER``: tuned kernels as well.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import tvm
from tvm import relax

import tvm_split
from scripts.harness import Case, Ratio, Setup, Side
from scripts.processes import Prepared
from scripts.sides import by_onnxruntime, by_torch, in_process, loaded, timed
from tests.models import torch_models

OURS, TUNED, ONNXRUNTIME, TORCH, TVM = "tvm-split", "tvm-split, tuned", "onnxruntime", "torch", "TVM by default"
SMALLEST = "mobilenet_v2"
"""The only network that runs within seconds with TVM's default kernels."""


@contextmanager
def by_tvm(name: str, threads: int) -> Iterator[Prepared]:
    """Run the imported module, compiled by ``relax.build`` only."""
    _, arrays, model = loaded(name)
    target = tvm_split.plan(model, tvm_split.Cluster.in_process(1, threads=threads)).machines[0].target
    executable = relax.build(model.module, tvm.target.Target(dict(target)))
    tensors = list(map(tvm.runtime.tensor, arrays))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    os.environ["TVM_NUM_THREADS"] = str(threads)
    with ThreadPoolExecutor(1) as pool:  # TVM has a thread pool per calling thread, whose size is set when it starts
        yield Prepared(timed(lambda: pool.submit(machine["main"], *tensors).result(), runs=1))


def sides(name: str, threads: int, setup: Setup) -> Sequence[Side]:
    arguments = {"name": name, "threads": threads}
    all_sides = [setup.side(OURS, in_process, checkout, **arguments) for checkout in setup.checkouts]
    if database := setup.options.values.get("database"):
        all_sides.append(setup.side(TUNED, in_process, database=database, **arguments))
    all_sides += [setup.side(ONNXRUNTIME, by_onnxruntime, **arguments), setup.side(TORCH, by_torch, **arguments)]
    return [*all_sides, setup.side(TVM, by_tvm, **arguments)] if name == SMALLEST else all_sides


CASE = Case(
    subjects={
        f"{name}, {threads} threads": partial(sides, name, threads)
        for threads in (2, 1)
        for name in torch_models.published_models()
    },
    ratios=(
        Ratio("seconds", OURS, ONNXRUNTIME),
        Ratio("seconds", OURS, TORCH),
        Ratio("seconds", TUNED, OURS),
    ),
    rounds=8,
)
