"""Lines of README's table that need JAX, Flax, Keras or LiteRT."""

from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx
from jax import export

from tests.helpers.frontends.tflite_networks import network as tflite_network
from tests.helpers.readme_table import run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def network(x: jax.Array) -> jax.Array:
    with jax.named_scope("hidden"):
        return jnp.tanh(x) * 2


def test_from_jax_and_flax(folder: Path) -> None:
    x = np.ones((2, 3), "float32")
    for function, layer in ((network, "hidden"), (nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0))), "layers/0")):
        assert run("a function of JAX, a module of `flax.nnx` or `flax.linen`", function=function, x=x).layer_names == (
            layer,
        )
    exported = export.export(jax.jit(network))(x)
    (folder / "model.jax").write_bytes(exported.serialize())
    assert "machine-a" in run("a file of `jax.export`")
    (folder / "model.mlir").write_text(jax.jit(network).lower(x).as_text(debug_info=True))
    assert "hidden" in run("StableHLO, text or bytecode")


def test_from_keras(folder: Path) -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, name="head")])
    assert run("a model of Keras", keras_model=model).layer_names == ("head",)
    model.save(folder / "model.keras")
    assert "head" in run("a file of Keras")


def test_from_tflite(folder: Path) -> None:
    (folder / "model.tflite").write_bytes(tflite_network())
    assert "machine-a" in run("TFLite")
