"""MobileNetV2 from torch and from Keras, and a TFLite file if one is given, in turns: does the source cost anything?

All are the same network, with weights of their own, compiled for one thread of this host, batch 1. Keras computes with
what KERAS_BACKEND says (JAX: StableHLO is imported). Bundles stay in a folder, so that compiling and measuring can be
apart.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

import tvm_split
from scripts.rounds import Rounds, in_turns, median_seconds, medians, ratio, written
from tests.models.torch_models import mobilenet_v2

PIXELS = 224
RUNS_A_TURN = 8
ALLOWED = 1.15

Source = Callable[[], tvm_split.Model]


def from_torch() -> tvm_split.Model:
    return tvm_split.load_model(mobilenet_v2(), (torch.zeros(1, 3, PIXELS, PIXELS),))


def from_keras() -> tvm_split.Model:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.utils.set_random_seed(0)
    network = keras.applications.MobileNetV2(weights=None, input_shape=(PIXELS, PIXELS, 3))
    return tvm_split.load_model(network, batch=1)


def compiled(source: Source, folder: Path) -> tvm_split.Bundle:
    if not folder.exists():
        model = source()
        cluster = tvm_split.Cluster.in_process(1, threads=1)
        tvm_split.compile(model, tvm_split.plan(model, cluster), verify=False).save(folder)
    return tvm_split.Bundle.load(folder)


def compare(sources: Mapping[str, Source], folder: Path, rounds: int) -> Rounds:
    """The seconds of each source's network, in turns; all are compiled before the first is measured."""
    bundles = {name: compiled(source, folder / name) for name, source in sources.items()}
    with ExitStack() as stack:
        sides = {}
        for name, bundle in bundles.items():
            deployment = stack.enter_context(tvm_split.deploy(bundle, tvm_split.Cluster.in_process(1, threads=1)))
            (spec,) = bundle.program.inputs
            x = np.random.default_rng(0).standard_normal(spec.shape).astype(spec.dtype)
            sides[name] = partial(median_seconds, partial(deployment.run, x), RUNS_A_TURN)
        return in_turns(sides, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundles", type=Path, default=Path("demo-output/sources"), help="compiled networks lie here")
    parser.add_argument("--tflite", type=Path, help=f"a file of the same network, {PIXELS} pixels")
    parser.add_argument("--rounds", type=int, default=20, help="0 compiles only")
    parser.add_argument("--output", type=Path, help="a file of JSON")
    options = parser.parse_args()
    sources: dict[str, Source] = {"torch": from_torch, "keras": from_keras}
    if options.tflite is not None:
        sources["tflite"] = partial(tvm_split.load_model, options.tflite, batch=1)
    found = compare(sources, options.bundles, options.rounds)
    if not options.rounds:
        return 0
    shares = {name: ratio(found, "seconds", name, "torch") for name in sources}
    for name, figures in medians(found).items():
        print(f"{name:8} {1e3 * figures['seconds']:8.2f} ms, {shares[name]:.3f} of torch's")
    written(options.output, {"rounds": found, "of_torch": shares})
    return int(shares["keras"] > ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
