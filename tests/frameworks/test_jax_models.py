"""Networks of flax.nnx, flax.linen and plain JAX, split over two workers by the names of their layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx

import tvm_split
from tests.helpers.frontends.comparison import assert_split_like
from tests.helpers.frontends.contract import assert_keeps_contract
from tvm_split.frontends import load_model


def random(*shape: int, dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class NnxBlock(nnx.Module):
    def __init__(self, channels: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(channels, channels, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(channels, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.norm(self.conv(x)) + x)


class NnxConvolutions(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(8, rngs), NnxBlock(8, rngs)])
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, kernel_dilation=2, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (3, 3), strides=(2, 2), rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = nnx.max_pool(self.depthwise(x), (2, 2), strides=(2, 2), padding="SAME")
        x = nnx.avg_pool(self.up(x), (2, 2), strides=(2, 2))
        return self.head(self.dropout(x.mean((1, 2)))), x


class NnxTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        mask = nnx.make_causal_mask(ids)
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


def moved(module: Any) -> Any:
    """Return the module with other statistics than those of new batch norms, and without dropout."""
    graph, state = nnx.split(module)
    generator = np.random.default_rng(1)

    def changed(leaf: Any) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf + 0.2 * generator.random(leaf.shape).astype(leaf.dtype) if is_float else leaf

    module = nnx.merge(graph, jax.tree.map(changed, state))
    module.eval()
    return module


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.relu(linen.GroupNorm(2)(linen.Conv(8, (3, 3), kernel_dilation=2)(x)))
        return x + linen.Conv(8, (1, 1), name="mix")(y)


class LinenConvolutions(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(8, (3, 3), strides=2, name="stem")(x)
        shared = LinenBlock(name="shared")
        x = linen.BatchNorm(use_running_average=True)(shared(x))
        x = linen.relu(linen.ConvTranspose(8, (4, 4), strides=(2, 2))(shared(x)))
        x = linen.avg_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        return linen.Dense(5, name="head")(x.reshape(x.shape[0], -1))


class LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.MultiHeadDotProductAttention(2, name="attention")(linen.LayerNorm()(x))
        x = x + y
        return x + linen.Dense(8, name="down")(linen.silu(linen.Dense(16, name="up")(linen.RMSNorm()(x))))


def bound(module: Any, *inputs: Any) -> Any:
    variables = module.init(jax.random.key(0), *inputs)
    generator = np.random.default_rng(1)
    return module.bind(
        jax.tree.map(lambda leaf: leaf + 0.2 * generator.random(leaf.shape).astype("float32"), variables)
    )


def recurrent() -> Callable[..., Any]:
    weights, inner = random(6, 6) / 3, random(5, 6, seed=1)

    def network(sequence: Any) -> Any:
        with jax.named_scope("inputs"):
            projected = sequence @ inner

        def step(state: Any, row: Any) -> Any:
            state = jnp.tanh(state @ weights + row)
            return state, state

        with jax.named_scope("cell"):
            last, states = jax.lax.scan(step, jnp.zeros((2, 6)), projected)
        with jax.named_scope("outputs"):
            return {"last": last, "states": jax.nn.softmax(states), "sum": states.sum()}

    return network


def stacked_layers() -> Callable[..., Any]:
    def network(weights: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            x = jax.nn.relu(x @ weights["first"])
        with jax.named_scope("layers"):
            x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights["layers"])[0]
        with jax.named_scope("last"):
            return x @ weights["last"]

    return functools.partial(network, {"first": random(4, 6), "layers": random(3, 6, 6) / 2, "last": random(6, 2)})


IMAGE = random(2, 17, 16, 3)
SEQUENCE = random(2, 6, 8)
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[np.ndarray, ...], list[str]]] = {
    "nnx_convolutions": (lambda: moved(NnxConvolutions(nnx.Rngs(0))), (IMAGE,), ["stem", "blocks/1"]),
    "nnx_transformer": (
        lambda: moved(NnxTransformer(nnx.Rngs(0))),
        (np.random.default_rng(0).integers(0, 11, (2, 6)).astype("int32"),),
        ["embed", "up"],
    ),
    "linen_convolutions": (lambda: bound(LinenConvolutions(), IMAGE), (IMAGE,), ["stem", "ConvTranspose_0"]),
    "linen_transformer": (lambda: bound(LinenTransformer(), SEQUENCE), (SEQUENCE,), ["attention", "up"]),
    "recurrent": (recurrent, (random(7, 2, 5),), ["inputs", "outputs"]),
    "stacked_layers": (stacked_layers, (random(3, 4),), ["first", "last"]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_answers_are_those_of_jax(name: str, three_workers: tvm_split.Cluster) -> None:
    build, inputs, (first, second) = NETWORKS[name]
    assert_split_like(build(), inputs, (first, second), three_workers)


def test_half_precision_stays_what_it_is(three_workers: tvm_split.Cluster) -> None:
    network = bound(LinenTransformer(), SEQUENCE)
    module, variables = network.unbind()
    halved = module.bind(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), variables))
    assert_split_like(halved, [SEQUENCE.astype(ml_dtypes.bfloat16)], ("attention", "up"), three_workers, 0.05)


def test_layers_are_called_as_in_the_source() -> None:
    build, inputs, _ = NETWORKS["nnx_convolutions"]
    model = load_model(build(), inputs)
    assert_keeps_contract(model)
    assert {
        "stem", "blocks/0/conv", "blocks/0/norm", "blocks/0/relu", "blocks/1/add", "depthwise", "up", "head",
    } <= set(model.layer_names)  # fmt: skip
    assert model.name == "NnxConvolutions"
    build, inputs, _ = NETWORKS["linen_convolutions"]
    names = load_model(build(), inputs).layer_names
    assert {"stem", "shared/Conv_0", "shared/mix", "shared/mix@1", "BatchNorm_0", "ConvTranspose_0", "head"} <= set(
        names
    )


def test_a_channels_last_network_is_transposed_where_it_must_be() -> None:
    build, inputs, _ = NETWORKS["nnx_convolutions"]
    model = load_model(build(), inputs)
    transposed = [
        model.layers[binding.var.name]
        for binding in model.module["main"].body.blocks[0].bindings
        if getattr(getattr(binding.value, "op", None), "name", "") == "relax.permute_dims"
    ]
    assert len(transposed) == 2  # the input, and the output that is an image
    assert transposed[0] == "stem"
