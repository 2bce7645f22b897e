"""Functions of JAX that use what networks seldom do, and a trained one, split over two workers, against JAX itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import tvm_split
from tests.helpers.frontends.comparison import assert_split_like
from tests.helpers.frontends.digits import TRAINED, digits


def random(*shape: int, dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


WEIGHT, KERNEL = random(6, 6) / 2, random(3, 3, 2, 8)
X, IMAGE, PLACES = random(5, 6), random(2, 8, 8, 4), np.array([3, 0, 4, 1, 2], "int32")


def mapped(x: Any) -> Any:
    with jax.named_scope("first"):
        y = jax.vmap(lambda row: jnp.tanh(WEIGHT @ row))(x)
    with jax.named_scope("second"):
        return lax.map(lambda row: jax.nn.softmax(row @ WEIGHT), y), jax.vmap(jax.vmap(lambda s: s * s + 1))(y)


def known_branches(x: Any) -> Any:
    with jax.named_scope("first"):
        y = lax.cond(True, jnp.sin, jnp.cos, x)
    with jax.named_scope("second"):
        return lax.cond(x.shape[0] > 1, lambda v: v @ WEIGHT, lambda v: v, y)


def counted_loops(x: Any) -> Any:
    with jax.named_scope("first"):
        y = lax.fori_loop(0, 4, lambda i, v: v + jnp.sin(v) * i, x)
    with jax.named_scope("second"):
        (last, _), sums = lax.scan(
            lambda c, row: ((c[0] * 0.5 + row, c[1] + 1), (c[0].sum(), row * c[1])), (jnp.zeros(6), 0), y
        )
        return last, sums, lax.scan(lambda c, row: (c * 0.9 + row, c), jnp.ones(6), y, reverse=True, unroll=2)


def grouped(x: Any) -> Any:
    options = {"feature_group_count": 2, "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    with jax.named_scope("first"):
        y = jax.nn.relu(lax.conv_general_dilated(x, KERNEL, (1, 2), "SAME", **options))
    with jax.named_scope("second"):
        large = jax.image.resize(y, (2, 12, 10, 8), "bilinear")
        return large, lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def ordered(x: Any) -> Any:
    with jax.named_scope("first"):
        y = jnp.sort(jnp.sin(x), axis=-1, descending=True)
    with jax.named_scope("second"):
        return *lax.top_k(y * 2, 3), jnp.argsort(y, axis=0), jnp.argmax(y[:, ::-1], 1), jnp.median(y, axis=1)


def placed(x: Any, places: Any) -> Any:
    with jax.named_scope("first"):
        y = jnp.tanh(x)[places]
    with jax.named_scope("second"):
        cut = lax.dynamic_slice(y, (places[0], 1), (2, 3))
        return cut, lax.dynamic_update_slice(y, cut, (0, places[1])), y.at[places].add(1.0), y[:, places]


def summed(x: Any) -> Any:
    with jax.named_scope("first"):
        y = jnp.cumsum(x, 1)
    with jax.named_scope("second"):
        return y * jnp.cumprod(x, 0), lax.cummax(y, axis=1), lax.associative_scan(jnp.add, y, axis=0)


def differentiated(x: Any) -> Any:
    with jax.named_scope("first"):
        y = jax.checkpoint(lambda v: jnp.log1p(jnp.exp(v)))(x)
    with jax.named_scope("second"):
        return jax.grad(lambda v: jnp.sum(jnp.sin(v) ** 2))(y), jnp.einsum("bi,bj->bij", y, y)


def half(x: Any) -> Any:
    """Products of bfloat16 are added in float32."""
    with jax.named_scope("first"):
        y = jnp.dot(x, WEIGHT.astype(ml_dtypes.bfloat16), preferred_element_type=jnp.float32)
    with jax.named_scope("second"):
        return jax.nn.softmax(y)


@functools.cache
def trained() -> tuple[Callable[..., Any], dict[str, Any]]:
    """A small convolutional network, and what gradient descent found for it."""
    axes = ("NHWC", "HWIO", "NHWC")
    dense, bias = random(128, 10, seed=1) / 12, np.zeros(10, "float32")
    parameters = {"conv": random(3, 3, 1, 8) / 3, "dense": dense, "bias": bias}

    def network(parameters: Any, x: Any) -> Any:
        with jax.named_scope("conv"):
            x = jax.nn.relu(lax.conv_general_dilated(x, parameters["conv"], (2, 2), "SAME", dimension_numbers=axes))
        with jax.named_scope("dense"):
            return x.reshape(x.shape[0], -1) @ parameters["dense"] + parameters["bias"]

    images, labels = (array[:TRAINED] for array in digits())

    def loss(parameters: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(network(parameters, images)), labels[:, None], 1).mean()

    @jax.jit
    def step(_: int, state: Any) -> Any:
        parameters, speed = state
        speed = jax.tree.map(lambda v, gradient: 0.9 * v - 0.1 * gradient, speed, jax.grad(loss)(parameters))
        return jax.tree.map(jnp.add, parameters, speed), speed

    start = jax.tree.map(jnp.asarray, parameters)
    return network, lax.fori_loop(0, 150, step, (start, jax.tree.map(jnp.zeros_like, start)))[0]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (mapped, (X,)),
        (known_branches, (X,)),
        (counted_loops, (X,)),
        (grouped, (IMAGE,)),
        (ordered, (X,)),
        (placed, (X, PLACES)),
        (summed, (X,)),
        (differentiated, (X,)),
        (half, (X.astype(ml_dtypes.bfloat16),)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_answers_are_those_of_jax(function: Any, inputs: tuple[Any, ...], three_workers: tvm_split.Cluster) -> None:
    assert_split_like(function, inputs, ("first", "second"), three_workers)


def test_trained_digits_are_read_as_jax_reads_them(three_workers: tvm_split.Cluster) -> None:
    network, parameters = trained()
    images, labels = (array[TRAINED:] for array in digits())
    (scores,) = assert_split_like(functools.partial(network, parameters), (images,), ("conv", "dense"), three_workers)
    assert (scores.argmax(1) == labels).mean() > 0.9
