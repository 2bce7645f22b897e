"""One machine, one input at a time: this project's kernels against onnxruntime, torch, and what TVM builds by default.

Everything runs in this process on the same cores, in turns, so that a disturbance meets all. Each side has its own
defaults and a pause before its turn, because the threads of some spin for a while after their work. Medians are
printed, with the share of a multiply-add peak that is measured in the same run, and written as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import tvm
from rich.console import Console
from rich.table import Table
from tvm import relax

import tvm_split
from tests.models import torch_models
from tvm_split.compiler.targets import host_target
from tvm_split.compiler.tuning_folder import DATABASE_VARIABLE
from tvm_split.measuring.ceilings import Ceilings, measure_ceilings
from tvm_split.planner.cost import model_operations

MODELS = torch_models.published_models()
SMALLEST = "mobilenet_v2"
PAUSE_SECONDS = 0.1
WARM_UP_RUNS = 2
RUNS_A_TURN = 4

Run = Callable[[], Any]


@contextmanager
def this_project(
    model: tvm_split.Model, arrays: Sequence[np.ndarray], threads: int, database: Path | None
) -> Iterator[tuple[Run, float]]:
    """What to run, and the seconds that compiling took; with the kernels that a database has tuned, if one is given."""
    cluster = tvm_split.Cluster.in_process(1, threads=threads)
    start = time.perf_counter()
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster), verify=False, database=database)
    seconds = time.perf_counter() - start
    with tvm_split.deploy(bundle, cluster) as deployment:
        yield lambda: deployment.run(*arrays), seconds


def run_onnxruntime(network: torch.nn.Module, inputs: tuple[torch.Tensor, ...], threads: int, folder: Path) -> Run:
    path = folder / "network.onnx"
    if not path.exists():
        torch.onnx.export(network, inputs, str(path), dynamo=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: session.run(None, feed)


def run_torch(network: torch.nn.Module, inputs: tuple[torch.Tensor, ...], threads: int) -> Run:
    if inputs[0].ndim == 4:
        network = network.to(memory_format=torch.channels_last)
        inputs = tuple(each.to(memory_format=torch.channels_last) for each in inputs)

    def run() -> Any:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return network(*inputs)

    return run


@contextmanager
def tvm_by_default(model: tvm_split.Model, arrays: Sequence[np.ndarray], threads: int) -> Iterator[Run]:
    """The imported module through ``relax.build`` alone. On a thread of its own, since TVM keeps threads per caller."""
    executable = relax.build(model.module, tvm.target.Target(host_target(threads)))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    machine = relax.VirtualMachine(executable, tvm.cpu())

    def run() -> Any:
        os.environ["TVM_NUM_THREADS"] = str(threads)
        return pool.submit(machine["main"], *tensors).result()

    with ThreadPoolExecutor(1) as pool:
        yield run


def turn(run: Run) -> list[float]:
    """Milliseconds of a few runs, after a pause and a warm-up."""
    time.sleep(PAUSE_SECONDS)
    for _ in range(WARM_UP_RUNS):
        run()
    found = []
    for _ in range(RUNS_A_TURN):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def largest_difference(ours: Run, reference: Run) -> float:
    """Between the first outputs, as a share of the reference's range."""
    mine, theirs = ours()[0], reference()[0]
    return float(np.abs(mine - theirs).max() / np.abs(theirs).max())


def compare(
    name: str, threads: int, rounds: int, ceilings: Ceilings, folder: Path, database: Path | None
) -> dict[str, Any]:
    build, inputs = MODELS[name]
    network = build()
    model = tvm_split.load_model(network, inputs, name=name)
    arrays = [each.numpy() for each in inputs]
    with ExitStack() as stack:
        ours, compile_seconds = stack.enter_context(this_project(model, arrays, threads, None))
        runs = {
            "ours": ours,
            "onnxruntime": run_onnxruntime(network, inputs, threads, folder),
            "torch": run_torch(network, inputs, threads),
        }
        if database is not None:
            runs["tuned"], _ = stack.enter_context(this_project(model, arrays, threads, database))
        difference = largest_difference(runs["ours"], runs["onnxruntime"])
        times: dict[str, list[float]] = {side: [] for side in runs}
        for _ in range(rounds):
            for side, run in runs.items():
                times[side] += turn(run)
        if name == SMALLEST:
            # Over a hundred times as long: once is enough.
            times["tvm by default"] = turn(stack.enter_context(tvm_by_default(model, arrays, threads)))
    medians = {side: statistics.median(found) for side, found in times.items()}
    operations = model_operations(model)
    return {
        "model": name,
        "threads": threads,
        "milliseconds": medians,
        "ratio": medians["ours"] / medians["onnxruntime"],
        "gigaflops": operations / medians["ours"] / 1e6,
        "share_of_peak": operations / medians["ours"] * 1e3 / ceilings.operations_per_second,
        "difference": difference,
        "compile_seconds": compile_seconds,
    }


def print_results(threads: int, results: Sequence[dict[str, Any]], ceilings: Ceilings) -> float:
    """A table; returns the geometric mean of the ratios."""
    title = (
        f"{threads} threads; peak {ceilings.operations_per_second / 1e9:.0f} GFLOP/s, "
        f"memory {ceilings.bytes_per_second / 1e9:.0f} GB/s"
    )
    headings = ("model", "ours, ms", "tuned", "onnxruntime", "torch", "tvm default", "ratio to onnxruntime")
    table = Table(*headings, "GFLOP/s", "of peak", "difference", "compiled in", title=title)
    for each in results:
        times = each["milliseconds"]
        default, tuned = times.get("tvm by default"), times.get("tuned")
        table.add_row(
            each["model"],
            f"{times['ours']:.2f}",
            "" if tuned is None else f"{tuned:.2f}",
            *(f"{times[side]:.2f}" for side in ("onnxruntime", "torch")),
            "" if default is None else f"{default:.0f}",
            f"{each['ratio']:.2f}",
            f"{each['gigaflops']:.0f}",
            f"{each['share_of_peak']:.0%}",
            f"{each['difference']:.0e}",
            f"{each['compile_seconds']:.1f} s",
        )
    mean = math.prod(each["ratio"] for each in results) ** (1 / len(results))
    table.add_row("geometric mean", "", "", "", "", "", f"{mean:.2f}")
    Console(width=140).print(table)
    return mean


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--threads", type=int, nargs="*", default=[2, 1])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--database", type=Path, help="of `tvm-split tune`: its kernels beside the default ones")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    # Without this, a database in the user's own cache would pass for the default.
    os.environ[DATABASE_VARIABLE] = os.devnull
    written = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in arguments.threads:
            ceilings = measure_ceilings(threads)
            results = []
            for name in arguments.models or MODELS:
                own = Path(folder) / name
                own.mkdir(exist_ok=True)
                print(f"{name}, {threads} threads", file=sys.stderr)
                results.append(compare(name, threads, arguments.rounds, ceilings, own, arguments.database))
            mean = print_results(threads, results, ceilings)
            written.append(
                {
                    "threads": threads,
                    "peak_operations_per_second": ceilings.operations_per_second,
                    "peak_bytes_per_second": ceilings.bytes_per_second,
                    "geometric_mean_ratio": mean,
                    "models": results,
                }
            )
    if arguments.output:
        arguments.output.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
