"""Networks of Keras that several of its exports are tested with."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


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
