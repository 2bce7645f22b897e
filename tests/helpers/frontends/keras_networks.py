"""Networks of Keras that several of its exports are tested with, what they are given and how answers are compared."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

LIMIT = 1e-4


def convolutions() -> Any:
    image = layers.Input((16, 16, 3), name="image")
    x = layers.Conv2D(8, 3, strides=2, padding="same", name="stem")(image)
    x = layers.ReLU(name="act")(layers.BatchNormalization(name="norm")(x))
    block = keras.Sequential([layers.Conv2D(8, 3, padding="same", name="conv"), layers.ReLU(name="relu")], name="block")
    x = layers.Add(name="skip")([block(x), x])
    x = layers.DepthwiseConv2D(3, padding="same", dilation_rate=2, name="depthwise")(block(x))
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", name="up")(x)
    return keras.Model(image, layers.Dense(4, name="head")(layers.GlobalAveragePooling2D(name="pool")(x)), name="net")


def attention() -> Any:
    sequence = layers.Input((6, 8), name="sequence")
    x = layers.MultiHeadAttention(2, 4, name="attention")(sequence, sequence)
    x = layers.LayerNormalization(name="norm")(layers.Add(name="skip")([x, sequence]))
    return keras.Model(sequence, layers.Dense(3, activation="gelu", name="head")(x), name="attention_net")


def recurrent(is_unrolled: bool = False) -> Any:
    sequence = layers.Input((5, 6), name="sequence")
    lstm = layers.LSTM(4, return_sequences=True, unroll=is_unrolled)
    x = layers.GRU(4, unroll=is_unrolled, name="gru")(layers.Bidirectional(lstm, name="both_ways")(sequence))
    return keras.Model(sequence, layers.Dense(3, name="head")(x), name="recurrent")


def random_inputs(model: Any, batch: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((batch, *tensor.shape[1:])).astype("float32") for tensor in model.inputs]


def with_random_statistics(model: Any) -> Any:
    """Fresh weights have means of 0 and variances of 1, which hide what a batch norm does."""
    generator = np.random.default_rng(1)
    model.set_weights(
        [weights + 0.2 * generator.random(weights.shape).astype(weights.dtype) for weights in model.get_weights()]
    )
    return model


def assert_same(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(outputs) == len(expected)
    for actual, right in zip(outputs, expected, strict=True):
        assert actual.shape == right.shape
        assert np.abs(actual - right).max() <= LIMIT * np.ptp(right)
