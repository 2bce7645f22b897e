"""One machine, one input at a time: this project's kernels against onnxruntime, torch, and what TVM builds by default.

Everything runs in this process on the same cores, in turns, so that a disturbance meets all, each side with its own
defaults. Medians over rounds are printed, of ratios those within rounds, with the share of a multiply-add peak that is
measured in the same run, and written as JSON.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
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
from scripts.rounds import in_turns, largest_difference, median_seconds, medians, ratio, written
from tests.models import torch_models
from tvm_split.compiler.describe import model_operations
from tvm_split.compiler.targets import host_target
from tvm_split.compiler.tuning_folder import DATABASE_VARIABLE
from tvm_split.profiling.peaks import Ceilings, measure_ceilings

MODELS = torch_models.published_models()
SMALLEST = "mobilenet_v2"
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
        difference = largest_difference(runs["ours"]()[:1], runs["onnxruntime"]()[:1])
        found = in_turns({side: partial(median_seconds, run, RUNS_A_TURN) for side, run in runs.items()}, rounds)
        seconds = {side: each["seconds"] for side, each in medians(found).items()}
        if name == SMALLEST:
            # Over a hundred times as long: once is enough.
            default = stack.enter_context(tvm_by_default(model, arrays, threads))
            seconds["tvm by default"] = median_seconds(default, RUNS_A_TURN)["seconds"]
    operations = model_operations(model)
    return {
        "model": name,
        "threads": threads,
        "milliseconds": {side: 1e3 * each for side, each in seconds.items()},
        "ratio": ratio(found, "seconds", "ours", "onnxruntime"),
        "gigaflops": operations / seconds["ours"] / 1e9,
        "share_of_peak": operations / seconds["ours"] / ceilings.operations_per_second,
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
    content = []
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
            content.append(
                {
                    "threads": threads,
                    "peak_operations_per_second": ceilings.operations_per_second,
                    "peak_bytes_per_second": ceilings.bytes_per_second,
                    "geometric_mean_ratio": mean,
                    "models": results,
                }
            )
    written(arguments.output, {"results": content})
    return 0


if __name__ == "__main__":
    sys.exit(main())
