"""Networks of several frameworks in threads of one process."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import torch
from flax import linen, nnx

from tests.helpers.frontends.tflite_networks import network
from tests.helpers.frontends.threads import assert_same_in_threads


def test_networks_of_several_frameworks_are_loaded_and_compiled_at_the_same_time() -> None:
    generator = np.random.default_rng(0)
    row, image = (generator.standard_normal(shape).astype("float32") for shape in ((2, 4), (1, 8, 8, 3)))

    def scoped(x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            x = jnp.tanh(x)
        with jax.named_scope("second"):
            return jnp.cumsum(x, axis=1)

    dense = linen.Dense(3)
    sources = [
        (scoped, (row,)),
        (nnx.Linear(4, 3, rngs=nnx.Rngs(0)), (row,)),
        (dense.bind(dense.init(jax.random.key(0), row)), (row,)),
        (keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, name="head")]), (row,)),
        (network(), (image,)),
        (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), (row,)),
    ]
    assert_same_in_threads(sources)
