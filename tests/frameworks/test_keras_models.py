"""Networks of Keras, split over two workers by the names of their layers, against Keras itself.

Keras computes with one backend in a process: `make test-extra NAME=frameworks` runs this file with JAX and with torch.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

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
from tvm_split.cluster.machine import Machine
from tvm_split.compiler.targets import host_target
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model
from tvm_split.launchers.local import InProcess


def several() -> Any:
    image, vector = layers.Input((8, 8, 3), name="one"), layers.Input((6,), name="other")
    shared = layers.Conv2D(4, 3, padding="same", activation="relu", name="shared")
    x = shared(layers.Conv2D(3, 1, name="first")(image))
    skip = layers.Add(name="skip")([x, layers.Conv2D(4, 1, name="side")(image)])
    pooled = layers.GlobalAveragePooling2D(name="pool")(skip)
    joined = layers.Concatenate(name="join")([pooled, layers.Dense(4, activation="elu", name="other_dense")(vector)])
    return keras.Model([image, vector], [layers.Dense(3, name="a")(joined), layers.Dense(2, name="b")(pooled), skip])


def mobilenet() -> Any:
    image = layers.Input((96, 96, 3), name="image")
    return keras.applications.MobileNetV2(input_tensor=image, alpha=0.35, weights=None, classes=10)


def efficientnet() -> Any:
    image = layers.Input((32, 32, 3), name="image")
    return keras.applications.EfficientNetB0(input_tensor=image, weights=None, classes=10)


@pytest.mark.parametrize(
    ("build", "second"),
    [
        (convolutions, "depthwise"),
        (several, "skip"),
        (recurrent, "gru"),
        (attention, "norm"),
        (mobilenet, "block_6_expand"),
        (efficientnet, "block4a_expand_conv"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_answers_are_those_of_keras(
    build: Callable[[], Any], second: str, three_workers: tvm_split.Cluster, tmp_path: Path
) -> None:
    network = with_random_statistics(build())
    inputs = random_inputs(network, batch=2)
    expected = keras.tree.flatten(network.predict(inputs if len(inputs) > 1 else inputs[0], verbose=0))
    network.save(tmp_path / "network.keras")
    model = load_model(tmp_path / "network.keras", batch=2)
    assert_keeps_contract(model)
    assert [spec.name for spec in model.inputs] == [tensor.name for tensor in network.inputs]
    first = model.layer_names[0]
    outputs = run_split(model, inputs, (first, second), three_workers)
    assert_same(outputs, expected)


def test_every_layer_of_a_known_network_keeps_its_name() -> None:
    network = mobilenet()
    names = set(load_model(network, batch=1).layer_names)
    layer_names = {layer.name for layer in network.layers if not isinstance(layer, layers.InputLayer)}
    assert layer_names <= names | {name.partition("/")[0] for name in names}


def test_layers_that_are_called_again_are_counted() -> None:
    names = load_model(convolutions(), batch=1).layer_names
    assert {"block/conv", "block/conv@1"} <= set(names)


def test_inputs_by_name_and_sizes() -> None:
    network = several()
    image, vector = random_inputs(network, batch=3)
    model = load_model(network, {"other": vector, "one": image})
    assert [spec.shape for spec in model.inputs] == [(3, 8, 8, 3), (3, 6)]
    assert len(model.example_inputs) == 2
    assert load_model(network, (image, vector), batch=5).inputs[1].shape == (5, 6)
    with pytest.raises(ModelImportError, match=r"axis 0 of input 'one'.*batch=1"):
        load_model(network)


@pytest.mark.parametrize("keys", [("x", "y"), ("y", "x")], ids="".join)
def test_inputs_by_keys_of_their_own(keys: tuple[str, str], three_workers: tvm_split.Cluster, tmp_path: Path) -> None:
    """The tensors' names have another order than the keys, and exchanged inputs give another result."""
    first, second = keys
    minuend, vector = layers.Input((4,), name="b"), layers.Input((4,), name="a")
    x = layers.Subtract(name="less")([minuend, layers.Dense(4, name="hidden")(vector)])
    network = keras.Model({first: minuend, second: vector}, layers.Dense(2, name="head")(x), name="keyed")
    generator = np.random.default_rng(0)
    inputs = {key: generator.standard_normal((3, 4)).astype("float32") for key in keys}
    expected = keras.ops.convert_to_numpy(network(inputs))
    network.save(tmp_path / "keyed.keras")
    model = load_model(tmp_path / "keyed.keras", batch=3)
    assert [spec.name for spec in model.inputs] == ["x", "y"]
    assert_same(run_split(model, [inputs["x"], inputs["y"]], ("hidden", "head"), three_workers), [expected])
    assert_same(load_model(network, inputs).reference.outputs([inputs["x"], inputs["y"]]), [expected])
    with pytest.raises(ModelImportError, match=r"inputs are \['x', 'y'\], example_inputs has \['a', 'b'\]"):
        load_model(network, {"a": inputs["x"], "b": inputs["y"]})


def test_nested_inputs() -> None:
    first, second, third = (layers.Input((4,), name=name) for name in "abc")
    network = keras.Model({"x": [first, second], "y": third}, layers.Concatenate(name="join")([third, second, first]))
    a, b, c = random_inputs(network, batch=2)
    model = load_model(network, {"a": a, "b": b, "c": c})
    assert [spec.name for spec in model.inputs] == ["a", "b", "c"]
    np.testing.assert_array_equal(model.reference.outputs([a, b, c])[0], np.concatenate([c, b, a], axis=-1))


@pytest.mark.parametrize("is_dict", [False, True])
def test_outputs_have_the_names_of_their_layers_or_keys(is_dict: bool) -> None:
    x = layers.Input((4,), name="x")
    heads = [layers.Dense(2, name="scores")(x), layers.Dense(3, name="boxes")(x)]
    network = keras.Model(x, dict(zip(("s", "b"), heads, strict=True)) if is_dict else heads)
    shapes = {"s": (1, 2), "b": (1, 3)} if is_dict else {"scores": (1, 2), "boxes": (1, 3)}
    assert {spec.name: spec.shape for spec in load_model(network, batch=1).outputs} == shapes


def test_a_bfloat16_input() -> None:
    x = layers.Input((4,), name="x", dtype="bfloat16")
    network = keras.Model(x, layers.Dense(2, name="head", dtype="bfloat16")(x))
    for examples in (None, np.ones((2, 4), "float32")):
        model = load_model(network, examples, batch=2)
        assert [(spec.shape, spec.dtype) for spec in model.inputs] == [((2, 4), "bfloat16")]
        assert_keeps_contract(model)


def test_a_model_without_known_inputs_needs_examples(three_workers: tvm_split.Cluster) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="own")
            self.hidden = layers.Dense(4, activation="relu", name="hidden")
            self.out = layers.Dense(2, name="out")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.out(self.hidden(x) * 2)

    network, x = Own(), np.random.default_rng(0).standard_normal((2, 5)).astype("float32")
    with pytest.raises(ModelImportError, match="'own' does not know its inputs' shapes"):
        load_model(network, batch=1)
    expected = keras.ops.convert_to_numpy(network(x))
    model = load_model(network, x)
    assert {"hidden", "out"} <= set(model.layer_names)
    assert_same(run_split(model, [x], ("hidden", "out"), three_workers), [expected])


class Counts(layers.Layer):
    """Multiplies by the number of its calls."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(name="count", shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return x * self.count


class Trained(layers.Layer):
    """Computes ``part`` as in training."""

    def __init__(self, part: Any, name: str) -> None:
        super().__init__(name=name)
        self.part = part

    def build(self, shape: Any) -> None:
        self.part.build(shape)

    def call(self, x: Any) -> Any:
        return self.part(x, training=True)


@pytest.mark.parametrize(
    ("layer", "path"),
    [
        (lambda: layers.LSTM(5, stateful=True, name="keeps"), "keeps"),
        (lambda: layers.Bidirectional(layers.GRU(5, stateful=True, name="gru"), name="both"), "both/.*gru"),
        (lambda: Counts(name="counts"), "counts"),
        (lambda: Trained(layers.BatchNormalization(name="norm"), "block"), "block/norm"),
        (lambda: Trained(layers.Dropout(0.5, name="drop"), "block"), "block/drop"),
    ],
    ids=["lstm", "bidirectional", "counter", "norm", "dropout"],
)
def test_a_layer_with_state_is_refused_and_keeps_it(layer: Callable[[], Any], path: str) -> None:
    network = keras.Sequential([layers.Input((4, 3), batch_size=2), layer(), layers.Dense(2)])
    x = np.ones((2, 4, 3), "float32")
    before = [np.array(keras.ops.convert_to_numpy(value)) for value in network.variables]
    with pytest.raises(ModelImportError, match=f"(changes variables of {path}.* keeps no state|random.* {path})"):
        load_model(network, x)
    for value, expected in zip(network.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(value), expected)
    network(x)


def test_a_model_that_was_never_called_is_imported_and_usable() -> None:
    class Fresh(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="fresh")
            self.hidden, self.out = layers.Dense(4, name="hidden"), layers.LSTM(2, name="out")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.out(self.hidden(x))

    network, x = Fresh(), np.random.default_rng(0).standard_normal((2, 4, 3)).astype("float32")
    model = load_model(network, x)
    assert_same(model.reference.outputs([x]), [keras.ops.convert_to_numpy(network(x))])


@pytest.mark.parametrize("backend", ["nonsense", "tensorflow"])
def test_a_backend_that_is_not_there_is_named(backend: str, tmp_path: Path) -> None:
    several().save(tmp_path / "several.keras")
    code = "import sys, tvm_split; tvm_split.load_model(sys.argv[1], batch=1)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "several.keras")],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"ModelImportError: '{tmp_path}/several.keras': Keras cannot be imported with {backend} to compute" in last


def test_files_that_are_no_models_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.keras").write_bytes(b"no model")
    with pytest.raises(ModelImportError, match=r"broken\.keras"):
        load_model(tmp_path / "broken.keras")


def test_only_the_first_kernel_transposes(tmp_path: Path) -> None:
    model = load_model(mobilenet(), batch=1)
    cluster = tvm_split.Cluster(
        (Machine("machine-a", target={**host_target(1), "opt-level": 0}),), launcher=InProcess()
    )
    tvm_split.compile(model, tvm_split.plan(model, cluster), verify=False, dump_folder=tmp_path)
    (compiled,) = tmp_path.glob("stage_0/*-schedule.py")
    kernels = re.findall(r"R\.call_tir\(cls\.(\w+)", compiled.read_text())
    assert len(kernels) > 52
    assert ["transpose" in kernel for kernel in kernels] == [True, *[False] * (len(kernels) - 1)], kernels
