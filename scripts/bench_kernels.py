"""This project's kernels in one process against onnxruntime on the same cores: latency of one input at a time.

The networks are those of the onnx package with seeded weights, so both run the very same model. Rounds are interleaved;
medians and their ratio are printed, and written as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

import tvm_split
from tests.models.onnx_models import light_model

MODELS = ("light_resnet50", "light_squeezenet", "light_densenet121", "light_inception_v2", "light_vgg19")


def milliseconds(run: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def compare(name: str, threads: int, rounds: int) -> dict[str, float]:
    proto = light_model(name)
    model = tvm_split.load_model(proto, name=name)
    generator = np.random.default_rng(0)
    inputs = tuple(generator.standard_normal(each.shape).astype(each.dtype) for each in model.inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Both sides' threads spin while they wait; on the same cores they would wait for each other's.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {each.name: array for each, array in zip(session.get_inputs(), inputs, strict=True)}
    cluster = tvm_split.Cluster.in_process(1, threads=threads)
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster), verify=False)
    times: dict[str, list[float]] = {"ours": [], "onnxruntime": []}
    with tvm_split.deploy(bundle, cluster) as deployment:
        runs = {"ours": lambda: deployment.run(*inputs), "onnxruntime": lambda: session.run(None, feed)}
        for each in runs.values():
            milliseconds(each, 3)
        for _ in range(rounds):
            for side, run in runs.items():
                times[side] += milliseconds(run, 5)
    medians = {side: statistics.median(found) for side, found in times.items()}
    return {**medians, "ratio": medians["ours"] / medians["onnxruntime"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    results = []
    for threads in arguments.threads:
        table = Table("model", "ours, ms", "onnxruntime, ms", "ratio", title=f"{threads} threads")
        ratios = []
        for name in arguments.models:
            found = compare(name, threads, arguments.rounds)
            ratios.append(found["ratio"])
            results.append({"model": name, "threads": threads, **found})
            table.add_row(name, f"{found['ours']:.2f}", f"{found['onnxruntime']:.2f}", f"{found['ratio']:.2f}")
        table.add_row("geometric mean", "", "", f"{math.prod(ratios) ** (1 / len(ratios)):.2f}")
        Console().print(table)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
