"""Keras's less common layers, split over two workers by their names, against Keras itself; with JAX, and with torch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import tvm_split
from tests.helpers.frontends.comparison import run_split
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.helpers.frontends.keras_networks import assert_same, with_random_statistics
from tvm_split.frontends import load_model


def volumes() -> Any:
    video = layers.Input((6, 8, 8, 2), name="video")
    x = layers.Conv3D(4, 3, padding="same", activation="relu", name="first")(video)
    x = layers.Conv3D(4, 3, padding="same", name="second")(layers.MaxPooling3D(2, name="largest")(x))
    return keras.Model(video, layers.Dense(3, name="head")(layers.GlobalAveragePooling3D(name="pool")(x)))


def dilated() -> Any:
    image = layers.Input((16, 16, 3), name="image")
    x = layers.SeparableConv2D(8, 3, dilation_rate=2, padding="same", name="first")(image)
    x = layers.LayerNormalization(axis=[1, 2, 3], name="norm")(x)
    return keras.Model(
        image, layers.SeparableConv2D(4, 3, dilation_rate=3, padding="same", activation="mish", name="second")(x)
    )


def resized() -> Any:
    image = layers.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, name="conv")(layers.ZeroPadding2D(((1, 2), (0, 1)), name="padded")(image))
    x = layers.Cropping2D(1, name="cut")(layers.UpSampling2D(2, interpolation="bilinear", name="large")(x))
    x = layers.GroupNormalization(2, name="norm")(layers.Conv2D(8, 3, groups=4, name="grouped")(x))
    x = layers.LeakyReLU(name="act")(layers.UpSampling2D(2, name="larger")(x))
    return keras.Model(image, layers.Permute((3, 1, 2), name="turned")(x))


def signals() -> Any:
    signal = layers.Input((20, 3), name="signal")
    x = layers.Conv1D(4, 3, strides=2, padding="same", name="first")(signal)
    x = layers.MaxPooling1D(2, name="largest")(layers.SeparableConv1D(4, 3, name="separable")(x))
    x = layers.UpSampling1D(2, name="long")(layers.Conv1DTranspose(3, 3, strides=2, name="up")(x))
    return keras.Model(signal, layers.AveragePooling1D(2, name="mean")(x))


def masked_attention() -> Any:
    sequence, mask = layers.Input((6, 8), name="sequence"), layers.Input((6,), dtype="bool", name="mask")
    attend = layers.MultiHeadAttention(2, 4, name="attention")
    x = attend(sequence, sequence, attention_mask=ops.expand_dims(mask, 1), use_causal_mask=True)
    x = layers.GroupQueryAttention(4, 4, 2, name="grouped")(x, x)
    return keras.Model([sequence, mask], layers.RMSNormalization(name="norm")(x))


def stacked() -> Any:
    words = layers.Input((6,), dtype="int32", name="words")
    x = layers.Embedding(11, 8, mask_zero=True, name="embed")(words)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True), name="first")(x)
    x = layers.Bidirectional(layers.GRU(3, reset_after=False), merge_mode="sum", name="second")(x)
    return keras.Model(words, layers.Dense(2, name="head")(x))


def frames() -> Any:
    video = layers.Input((3, 8, 8, 2), name="video")
    x = layers.TimeDistributed(layers.Conv2D(3, 3, name="inner"), name="each")(video)
    x = layers.ConvLSTM2D(3, 3, padding="same", name="memory")(x)
    return keras.Model(video, layers.Conv2D(2, 1, name="head")(x))


def shared() -> Any:
    left, right = layers.Input((8, 8, 3), name="left"), layers.Input((8, 8, 3), name="right")
    conv = layers.Conv2D(4, 3, strides=2, padding="same", name="conv")
    act = layers.PReLU(shared_axes=[1, 2], name="act")
    seen = keras.Sequential([conv, layers.BatchNormalization(name="norm"), act], name="eye")
    seen_left, seen_right = seen(left), seen(right)
    flat = [layers.Flatten(name="flat_left")(seen_left), layers.Flatten(name="flat_right")(seen_right)]
    squared = layers.Lambda(lambda t: ops.square(t) - ops.mean(t, axis=-1, keepdims=True), name="squared")
    likeness = layers.Dot(axes=-1, normalize=True, name="likeness")(flat)
    return keras.Model([left, right], {"squared": squared(flat[0]), "likeness": likeness, "left": seen_left})


def random_inputs(network: Any) -> list[np.ndarray]:
    generator = np.random.default_rng(0)

    def random(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if dtype == "bool":
            return np.concatenate([np.ones((shape[0], 1), bool), generator.random((shape[0], shape[1] - 1)) > 0.3], 1)
        if dtype == "int32":
            return np.sort(generator.integers(0, 11, shape).astype(dtype), 1)[:, ::-1].copy()  # zeros are behind
        return generator.standard_normal(shape).astype(dtype)

    return [random((2, *tensor.shape[1:]), str(tensor.dtype)) for tensor in network.inputs]


@pytest.mark.parametrize(
    ("build", "second"),
    [
        (volumes, "second"),
        (dilated, "second"),
        (resized, "grouped"),
        (signals, "up"),
        (masked_attention, "grouped"),
        (stacked, "second"),
        (frames, "head"),
        (shared, "likeness"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_answers_are_those_of_keras(build: Callable[[], Any], second: str, three_workers: tvm_split.Cluster) -> None:
    network = with_random_statistics(build())
    inputs = random_inputs(network)
    expected = [
        ops.convert_to_numpy(output) for output in keras.tree.flatten(network(inputs if inputs[1:] else inputs[0]))
    ]
    model = load_model(network, tuple(inputs))
    assert_keeps_contract(model)
    assert_same(run_split(model, inputs, (model.layer_names[0], second), three_workers), expected)


@pytest.mark.parametrize(("policy", "limit"), [("mixed_float16", 5e-3), ("mixed_bfloat16", 4e-2)])
def test_mixed_precision_rounds_as_keras_does(
    policy: str, limit: float, three_workers: tvm_split.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 output computed in half precision is compared with the tolerance of half precision."""
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        image = layers.Input((16, 16, 3), name="image")
        x = layers.BatchNormalization(name="norm")(layers.Conv2D(8, 3, padding="same", name="conv")(image))
        x = layers.GlobalAveragePooling2D(name="pool")(layers.ReLU(name="act")(x))
        network = keras.Model(image, layers.Dense(3, name="head", dtype="float32")(x))
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    network = with_random_statistics(network)
    (x,) = random_inputs(network)
    expected = ops.convert_to_numpy(network(x))
    (actual,) = run_split(network, [x], ("conv", "pool"), three_workers)
    assert actual.dtype == expected.dtype == np.float32
    assert np.abs(actual - expected).max() < limit * np.ptp(expected)
