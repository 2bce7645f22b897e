"""Networks that TensorFlow's converter makes TFLite files of, split over two workers by Keras's names of layers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tvm_split
from tests.helpers.frontends.comparison import run_split
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.helpers.frontends.keras_networks import (
    attention,
    convolutions,
    random_inputs,
    recurrent,
    with_random_statistics,
)
from tvm_split.compiler.verification import first_differing_layer
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model
from tvm_split.frontends.tflite.load import QUANTIZED_TOLERANCE

LIMIT = 1e-4


def several() -> Any:
    left, right = layers.Input((8,), name="left"), layers.Input((8,), name="right")
    shared = layers.Dense(6, activation="tanh", name="shared")
    joined = layers.Concatenate(name="joined")([shared(left), shared(right)])
    return keras.Model([left, right], [layers.Dense(4, name="score")(joined), layers.Dense(3, name="features")(joined)])


def prepared(build: Callable[[], Any]) -> tuple[Any, list[np.ndarray]]:
    """A network with statistics of its own, and inputs for it."""
    network = with_random_statistics(build())
    return network, random_inputs(network, batch=2)


def converter_of(network: Any, kind: str) -> Any:
    converter = tf.lite.TFLiteConverter.from_keras_model(network)
    if kind == "float16":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.target_spec.supported_types = [tf.float16]
    if kind == "int8":
        generator = np.random.default_rng(2)
        shapes = [(1, *tensor.shape[1:]) for tensor in network.inputs]
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: (
            [generator.standard_normal(shape).astype("float32") for shape in shapes] for _ in range(16)
        )
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    return converter


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    ("build", "first", "second"),
    [
        (convolutions, "stem", "depthwise"),
        (attention, "attention", "norm"),
        (partial(recurrent, True), "both_ways", "head"),
        (several, "shared", "score"),
    ],
)
def test_answers_are_those_of_litert(
    build: Callable[[], Any], first: str, second: str, kind: str, three_workers: tvm_split.Cluster, tmp_path: Path
) -> None:
    network, inputs = prepared(build)
    path = tmp_path / "net.tflite"
    path.write_bytes(converter_of(network, kind).convert())
    model = load_model(path, batch=2)
    assert_keeps_contract(model)
    names = [spec.name for spec in model.inputs]
    x = [inputs[[tensor.name for tensor in network.inputs].index(name)] for name in names]
    expected = model.reference.outputs(x)
    outputs = run_split(model, x, (first, second), three_workers)
    limit = LIMIT if kind != "int8" else QUANTIZED_TOLERANCE  # LiteRT's own kernels are 0.02 apart
    for actual, right in zip(outputs, expected, strict=True):
        assert np.abs(actual - right).max() < limit * np.ptp(right)
    if kind == "float32":
        assert first_differing_layer(model, model.reference, x) is None
        right = keras.tree.flatten(network(inputs, training=False))
        by_size = {np.shape(value): np.asarray(value) for value in right}
        for actual in outputs:
            assert np.abs(actual - by_size[actual.shape]).max() < LIMIT * np.ptp(actual)


def test_layers_keep_the_names_that_they_have_in_keras() -> None:
    network, _ = prepared(convolutions)
    names = load_model(converter_of(network, "float32").convert(), batch=1).layer_names
    assert {"stem", "norm", "act", "block/conv", "block/conv@1", "block/relu", "skip", "pool", "head"} <= set(names)
    assert {layer.name for layer in network.layers[1:]} <= {name.partition("/")[0] for name in names}


def test_quantised_inputs_and_outputs_stay_integers() -> None:
    network, _ = prepared(convolutions)
    converter = converter_of(network, "int8")
    converter.inference_input_type = converter.inference_output_type = tf.int8
    model = load_model(converter.convert(), batch=1)
    assert [spec.dtype for spec in (*model.inputs, *model.outputs)] == ["int8", "int8"]


class Doubling(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([4], tf.float32)])
    def __call__(self, x: Any) -> Any:
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 100.0, lambda y: (y * 2.0,), (x,))[0]


def test_loops_are_refused() -> None:
    module = Doubling()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([module.__call__.get_concrete_function()], module)
    with pytest.raises(ModelImportError, match=r"WHILE \(it loops while it runs; "):
        load_model(converter.convert())
