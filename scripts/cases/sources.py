"""Compare the speed of MobileNetV2 imported from torch, from Keras and, with ``--set tflite=FILE``, from that file."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import tvm_split
from scripts.harness import Case, Limit, Ratio, Setup, Side
from scripts.processes import Prepared
from scripts.sides import network, timed

TORCH, KERAS, TFLITE = "torch", "keras", "tflite"
PIXELS = 224
MOST_OVER_TORCH = 1.15


@contextmanager
def from_source(source: str, path: str = "") -> Iterator[Prepared]:
    """Run the network with one thread of this process; ``path`` is the TFLite file."""
    if source == TORCH:
        model = tvm_split.load_model(*network("mobilenet_v2"))
    elif source == KERAS:
        os.environ.setdefault("KERAS_BACKEND", "jax")
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.applications.MobileNetV2(weights=None, input_shape=(PIXELS, PIXELS, 3))
        model = tvm_split.load_model(layers, batch=1)
    else:
        model = tvm_split.load_model(path, batch=1)
    cluster = tvm_split.Cluster.in_process(1, threads=1)
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster), verify=False)
    (spec,) = model.inputs
    x = np.random.default_rng(0).standard_normal(spec.shape).astype(spec.dtype)
    with tvm_split.deploy(bundle, cluster) as deployment:
        yield Prepared(timed(lambda: deployment.run(x), runs=8))


def sides(setup: Setup) -> Sequence[Side]:
    all_sides = [setup.side(source, from_source, source=source) for source in (TORCH, KERAS)]
    if path := setup.options.values.get("tflite"):
        all_sides.append(setup.side(TFLITE, from_source, source=TFLITE, path=str(Path(path).resolve())))
    return all_sides


CASE = Case(
    subjects={"mobilenet_v2": sides},
    ratios=(Ratio("seconds", KERAS, TORCH), Ratio("seconds", TFLITE, TORCH)),
    limits=(Limit("seconds", MOST_OVER_TORCH, KERAS, TORCH),),
    rounds=20,
    needs=("keras", "jax"),
)
