"""SavedModels of TensorFlow and of Keras, split over two workers by their layers' names, against TensorFlow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tvm_split
from tests.helpers.frontends.comparison import run_split
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.helpers.frontends.keras_networks import (
    assert_same,
    attention,
    convolutions,
    random_inputs,
    recurrent,
    with_random_statistics,
)
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model
from tvm_split.frontends.names import scopes_of_keras


@pytest.mark.parametrize(
    ("build", "first", "second"),
    [(convolutions, "stem", "depthwise"), (recurrent, "both_ways", "head"), (attention, "attention", "norm")],
)
def test_answers_are_those_of_tensorflow(
    build: Callable[[], Any], first: str, second: str, three_workers: tvm_split.Cluster, tmp_path: Path
) -> None:
    network = with_random_statistics(build())
    network.export(tmp_path / "saved", verbose=False)
    (x,) = random_inputs(network, batch=2)
    expected = network.predict(x, verbose=0)
    model = load_model(tmp_path / "saved", batch=2)
    assert_keeps_contract(model)
    assert_same(run_split(model, [x], (first, second), three_workers), [expected])


def test_layers_keep_the_names_that_they_have_in_keras(tmp_path: Path) -> None:
    convolutions().export(tmp_path / "saved", verbose=False)
    names = load_model(tmp_path / "saved", batch=1).layer_names
    assert {"stem", "act", "block/conv", "block/conv@1", "skip", "head"} <= set(names)
    assert {layer.name for layer in convolutions().layers[1:]} <= {name.partition("/")[0] for name in names}


class Plain(tf.Module):
    def __init__(self) -> None:
        super().__init__(name="plain")
        self.weight = tf.Variable(np.random.default_rng(0).standard_normal((3, 4)).astype("float32"))

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x"), tf.TensorSpec([4], name="bias")])
    def __call__(self, x: Any, bias: Any) -> Any:
        with tf.name_scope("hidden"):
            hidden = tf.nn.relu(x @ self.weight + bias)
        with tf.name_scope("out"):
            return {"b": tf.nn.softmax(hidden), "a": tf.reduce_sum(hidden, 1)}


def test_a_module_of_tensorflow_and_its_open_sizes(tmp_path: Path) -> None:
    module = Plain()
    tf.saved_model.save(module, str(tmp_path / "saved"))
    x, bias = np.ones((2, 3), "float32"), np.arange(4, dtype="float32")
    model = load_model(str(tmp_path / "saved"), {"x": x, "bias": bias})
    by_name = dict(zip([spec.name for spec in model.inputs], [spec.shape for spec in model.inputs], strict=True))
    assert by_name == {"x": (2, 3), "bias": (4,)}
    assert {"hidden", "out"} <= {name.partition("/")[0] for name in model.layer_names}
    assert [spec.name for spec in model.outputs] == ["a", "b"]
    inputs = [{"x": x, "bias": bias}[spec.name] for spec in model.inputs]
    expected = module(x, bias)
    for actual, right in zip(model.reference.outputs(inputs), (expected["a"], expected["b"]), strict=True):
        np.testing.assert_allclose(actual, right.numpy(), rtol=1e-5)
    with pytest.raises(ModelImportError, match=r"axis 0 of input 'x'.*batch=1"):
        load_model(tmp_path / "saved")


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"nothing")
    with pytest.raises(ModelImportError, match="cannot be read as a SavedModel"):
        load_model(tmp_path)


def test_scopes_that_nobody_counted_stay_as_they_are() -> None:
    paths = [("net_1", "conv_1", "batchnorm"), ("net_1", "conv_1_3")]
    assert scopes_of_keras(paths) == [("conv", "batchnorm"), ("conv_1",)]
    assert scopes_of_keras([("net", "conv_1"), ("net", "conv_2")]) == [("net", "conv_1"), ("net", "conv_2")]
    assert scopes_of_keras([("hidden",), ("out",)]) == [("hidden",), ("out",)]
