# ruff: noqa: E501
# fmt: off
"""The table of the JAX sweep: one small function for each operation of StableHLO and each way of using it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """A function, inputs for it, and how far from JAX's answer it may be."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Array, ...]
    tolerance: float | None = None


CASES: list[Case] = []


def random(*shape: int, dtype: Any = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(dtype)


def whole(*shape: int, low: int = -9, high: int = 9, dtype: str = "int32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def case(name: str, function: Callable[..., Any], *inputs: Array, tolerance: float | None = None) -> None:
    CASES.append(Case(name, function, inputs, tolerance))


x, y = random(3, 4), random(3, 4, seed=1)
near_one = np.clip(random(3, 4) / 3, -0.9, 0.9)
for unary in ("abs", "negative", "exp", "tanh", "sin", "cos", "tan", "floor", "ceil", "sign", "expm1", "square", "cbrt", "sinh", "cosh", "arctan", "arcsinh", "isnan", "isfinite", "isinf", "rint", "logical_not"):
    case(unary, getattr(jnp, unary), x)
for unary in ("log", "sqrt", "log1p", "arccosh"):
    case(unary, getattr(jnp, unary), np.abs(x) + 1)
for unary in ("arcsin", "arccos", "arctanh"):
    case(unary, getattr(jnp, unary), near_one)
case("rsqrt", lax.rsqrt, np.abs(x) + 1)
case("logistic", jax.nn.sigmoid, x)
case("erf", lax.erf, x)
case("erfc", lax.erfc, x)
case("erf_inv", lax.erf_inv, np.float32([-1, -0.999, -0.5, 0, 0.3, 0.9999, 1]))
case("round_away", lambda a: lax.round(a, lax.RoundingMethod.AWAY_FROM_ZERO), np.float32([-2.5, -0.5, 0.5, 1.5, 1.2]))
case("round_even", lambda a: lax.round(a, lax.RoundingMethod.TO_NEAREST_EVEN), np.float32([-2.5, -0.5, 0.5, 1.5, 1.2]))
for binary in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "arctan2", "less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "mod", "fmod", "logaddexp", "hypot"):
    case(binary, getattr(jnp, binary), x, y)
for binary in ("add", "subtract", "multiply", "maximum", "minimum", "equal", "less", "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "mod", "fmod"):
    case(f"{binary}_integers", getattr(jnp, binary), whole(3, 4), np.where((z := whole(3, 4, seed=1)) == 0, 3, z))
for binary in ("logical_and", "logical_or", "logical_xor", "equal", "not_equal", "less", "maximum"):
    case(f"{binary}_booleans", getattr(jnp, binary), x > 0, y > 0)
case("divide_integers", lax.div, whole(3, 4), np.abs(whole(3, 4, seed=1)) + 1)
case("shifts", lambda a, b: (lax.shift_left(a, b), lax.shift_right_arithmetic(a, b), lax.shift_right_logical(a, b)), whole(3, 4), whole(3, 4, low=0, high=40, seed=1))
case("power", jnp.power, x, np.float32([2, 3, -1, 0.5]))
case("power_of_positives", jnp.power, np.abs(x) + 0.1, y)
case("power_by_2.5", lambda a: a**2.5, np.abs(x))
case("power_by_3", lambda a: a**3, x)
case("power_integers", lambda a: a**3, whole(3, 4))
case("where", jnp.where, x > 0, x, y)
case("clip", lambda a: jnp.clip(a, -0.5, 0.7), x)
case("clamp_by_tensors", lambda a, b: lax.clamp(b - 1, a, b + 1), x, y)
case("casts", lambda a: (a.astype("int32"), a.astype("float16"), a.astype(bool), (a > 0).astype("float32"), a.astype("bfloat16")), x)
case("broadcasting", lambda a, b: a[:, None, :] * b + 1, x, random(5, 4))
case("outer_broadcast", lambda a, b: a[:, None] - b[None, :], random(3), random(4))
case("broadcast_output", lambda a: jnp.broadcast_to(a[:, None], (3, 5, 4)), x)
case("broadcast_then_sum", lambda a: jnp.broadcast_to(a[:, None], (3, 5, 4)).sum((1, 2)), x)
case("broadcast_then_reshape", lambda a: jnp.broadcast_to(a[:, None], (3, 5, 4)).reshape(15, 4), x)
case("broadcast_then_slice", lambda a: jnp.broadcast_to(a[:, None], (3, 5, 4))[:, 1:3], x)
case("broadcast_then_concatenate", lambda a: jnp.concatenate([jnp.broadcast_to(a[:, None], (3, 2, 4)), jnp.ones((3, 1, 4))], 1), x)
case("broadcast_then_pad", lambda a: jnp.pad(jnp.broadcast_to(a[:, None], (3, 2, 4)), ((0, 0), (1, 1), (0, 2))), x)
case("scalars", lambda a: (a.sum(), a.sum() + 1, jnp.float32(2) * a.max()), x)

case("transpose", lambda a: a.transpose(2, 0, 1), random(2, 3, 4))
case("transpose_twice", lambda a: (a.transpose(2, 0, 1) + 1).transpose(0, 2, 1), random(2, 3, 4))
case("transpose_then_reshape", lambda a: a.transpose(2, 0, 1).reshape(4, 6), random(2, 3, 4))
case("transpose_then_squeeze", lambda a: a.transpose(2, 0, 1)[None, :, :, None], random(2, 3, 4))
case("transpose_and_add", lambda a, b: a.T + b, random(3, 4), random(4, 3))
case("reshape_merging", lambda a: a.reshape(6, 4), random(2, 3, 4))
case("concatenate", lambda a, b: jnp.concatenate([a, b.T, a], 0), x, random(4, 3))
case("slices", lambda a: (a[1:, ::2], a[0], a[:, -1], a[::-1, ::-1]), x)
case("split_and_stack", lambda a: jnp.stack(jnp.split(a, 2, 1), 0), x)
case("pad", lambda a: jnp.pad(a, ((1, 2), (0, 3)), constant_values=7), x)
case("pad_inside", lambda a: lax.pad(a, jnp.float32(-1), ((1, 0, 2), (0, 2, 1))), x)
case("pad_booleans", lambda a: lax.pad(a > 0, True, ((1, 0, 2), (-1, 2, 1))), x)
case("pad_negative", lambda a: lax.pad(a, jnp.float32(0), ((-1, 2, 0), (1, -2, 0))), x)
case("pad_inside_and_cut", lambda a: lax.pad(a, jnp.float32(0), ((-2, 0, 2), (0, -1, 1))), x)
case("pad_reflect", lambda a: jnp.pad(a, ((1, 1), (2, 2)), mode="reflect"), x)
case("roll", lambda a: jnp.roll(a, 2, 1), x)
case("tile", lambda a: jnp.tile(a, (2, 3)), x)
case("repeat", lambda a: jnp.repeat(a, 3, axis=0), x)
case("iota", lambda a: a + jnp.arange(4), x)
case("tril", jnp.tril, random(4, 4))
case("one_hot", lambda a: jax.nn.one_hot(a, 5), np.int32([0, 3, 4]))

for reduction in ("sum", "mean", "max", "min", "prod", "var", "std"):
    case(reduction, lambda a, name=reduction: getattr(jnp, name)(a, axis=1), random(2, 3, 4))
    case(f"{reduction}_of_all", lambda a, name=reduction: getattr(jnp, name)(a), random(2, 3, 4))
case("sum_integers", lambda a: a.sum(0), whole(3, 4))
case("max_integers", lambda a: a.max(0), whole(3, 4))
case("all_any", lambda a: (jnp.all(a > 0, 0), jnp.any(a > 0, 1)), x)
case("sum_initial", lambda a: jnp.sum(a, axis=0, initial=2.0), x)
case("argmax", lambda a: (jnp.argmax(a, 0), jnp.argmin(a, 1), jnp.argmax(a)), x)
case("argmax_of_equals", lambda a: (jnp.argmax(a, 0), jnp.argmin(a, 0)), np.zeros((3, 4), "float32"))
case("argmax_of_transposed", lambda a: jnp.argmax(a.transpose(2, 0, 1), 0), random(2, 3, 4))
case("cumulative", lambda a: (jnp.cumsum(a, 1), jnp.cumprod(a, 0), lax.cummax(a, 1), lax.cummin(a, 0), lax.cumsum(a, 1, reverse=True)), random(3, 5))
case("softmax", lambda a: jax.nn.softmax(a, -1), x)
case("log_softmax", lambda a: jax.nn.log_softmax(a, 0), x)
case("logsumexp", lambda a: jax.nn.logsumexp(a, 1), x)
case("layer_norm", lambda a: (a - a.mean(-1, keepdims=True)) * lax.rsqrt(a.var(-1, keepdims=True) + 1e-5), x)
for activation in ("relu", "relu6", "gelu", "silu", "elu", "selu", "softplus", "leaky_relu", "hard_swish", "mish", "celu", "soft_sign", "log_sigmoid"):
    case(activation, getattr(jax.nn, activation), x)

case("matmul", jnp.matmul, random(3, 4), random(4, 5))
case("matmul_vector", lambda a, b: (a @ b, b @ a.T), random(3, 4), random(4))
case("dot_vectors", jnp.dot, random(4), random(4, seed=2))
case("matmul_batched", jnp.matmul, random(2, 3, 4), random(2, 4, 5))
case("matmul_weight", lambda a: a @ jnp.asarray(random(4, 5)), random(2, 3, 4))
case("matmul_weight_first", lambda a: jnp.asarray(random(5, 3)) @ a, random(3, 4))
case("matmul_integers", lambda a, b: lax.dot(a, b, preferred_element_type="int32"), whole(3, 4, dtype="int8"), whole(4, 5, dtype="int8"))
for subscripts, shapes in {
    "bqhd,bkhd->bhqk": ((2, 3, 2, 4), (2, 5, 2, 4)), "bhqk,bkhd->bqhd": ((2, 2, 3, 5), (2, 5, 2, 4)), "ij,kj->ki": ((3, 4), (5, 4)),
    "abc,cd->dab": ((2, 3, 4), (4, 5)), "abc,bc->a": ((2, 3, 4), (3, 4)), "i,j->ij": ((3,), (4,)), "abcd,acbd->ab": ((2, 3, 4, 2), (2, 4, 3, 2)),
    "btc,chd->bthd": ((2, 3, 4), (4, 2, 3)), "bthd,hdc->btc": ((2, 3, 2, 4), (2, 4, 5)), "aab->b": ((3, 3, 4),),
}.items():
    case(f"einsum_{subscripts}", lambda *operands, subscripts=subscripts: jnp.einsum(subscripts, *operands), *(random(*shape, seed=place) for place, shape in enumerate(shapes)))


def convolved(dimensions: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"), **options: Any) -> Callable[..., Any]:
    def function(data: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(data, kernel, **{"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": dimensions, **options})

    return function


image, kernel = random(2, 9, 8, 4), random(3, 2, 4, 6)
case("conv", convolved(), image, kernel)
case("conv_constant_weight", lambda a: convolved()(a, kernel), image)
case("conv_valid", convolved(padding="VALID"), image, kernel)
case("conv_strides_same", convolved(window_strides=(2, 3)), image, kernel)
case("conv_dilated", convolved(rhs_dilation=(2, 2)), image, kernel)
case("conv_depthwise", convolved(feature_group_count=4), image, random(3, 3, 1, 8))
case("conv_groups", convolved(feature_group_count=2), image, random(3, 3, 2, 6))
case("conv_negative_padding", convolved(padding=((-1, 2), (1, -2))), image, kernel)
case("conv_nchw", convolved(("NCHW", "OIHW", "NCHW")), random(2, 4, 9, 8), random(6, 4, 3, 3))
case("conv_other_output", convolved(("NHWC", "HWIO", "NCHW")), image, kernel)
case("conv_1d", convolved(("NHC", "HIO", "NHC"), window_strides=(2,)), random(2, 9, 4), random(3, 4, 5))
case("conv_3d", convolved(("NDHWC", "DHWIO", "NDHWC"), window_strides=(1, 2, 1)), random(1, 5, 6, 7, 2), random(3, 3, 2, 2, 3))
for padding in ("SAME", "VALID", ((1, 2), (0, 1)), ((3, 3), (3, 3)), ((0, 0), (0, 0))):
    case(f"conv_transpose_{padding}", lambda a, padding=padding: lax.conv_transpose(a, kernel, (2, 3), padding), image)
case("conv_transpose_flipped", lambda a: lax.conv_transpose(a, random(3, 2, 6, 4), (2, 2), "SAME", transpose_kernel=True), image)
case("conv_transpose_dilated", lambda a: lax.conv_transpose(a, kernel, (2, 2), "SAME", rhs_dilation=(2, 1)), image)
case("conv_transpose_computed_weight", lambda a, b: lax.conv_transpose(a, b, (2, 2), "SAME"), image, kernel)
case("conv_transpose_1d", lambda a: lax.conv_transpose(a, random(3, 4, 5), (2,), "SAME"), random(2, 6, 4))
case("conv_transpose_strided", convolved(lhs_dilation=(2, 2), window_strides=(2, 1), padding=((1, 1), (2, 0))), image, kernel)
case("conv_transpose_longer_by_stride", convolved(lhs_dilation=(2, 2), padding=((1, 7), (2, 4))), image, kernel)
case("conv_transpose_groups", convolved(lhs_dilation=(2, 2), feature_group_count=2, padding=((1, 1), (2, 1))), image, random(3, 3, 2, 6))
case("conv_chain", lambda a: jax.nn.relu(convolved()(jax.nn.relu(convolved()(a, kernel)) + 1, random(3, 3, 6, 2))), image)
case("conv_then_flatten", lambda a: convolved()(a, kernel).reshape(2, -1) @ random(432, 3), image)


def pooled(function: Any, initial: float, window: tuple[int, ...], strides: tuple[int, ...], padding: Any, **options: Any) -> Callable[..., Any]:
    return lambda a: lax.reduce_window(a, np.asarray(initial, a.dtype), function, window, strides, padding, **options)


case("max_pool", pooled(lax.max, -np.inf, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), image)
case("max_pool_same", pooled(lax.max, -np.inf, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), image)
case("max_pool_dilated", pooled(lax.max, -np.inf, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", window_dilation=(1, 2, 2, 1)), image)
case("min_pool", pooled(lax.min, np.inf, (1, 3, 2, 1), (1, 2, 2, 1), "SAME"), image)
case("sum_pool_same", pooled(lax.add, 0, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), image)
case("max_pool_over_channels", pooled(lax.max, -np.inf, (1, 1, 1, 3), (1, 1, 1, 1), "SAME"), image)
case("max_pool_wide_padding", pooled(lax.max, -np.inf, (1, 2, 2, 1), (1, 1, 1, 1), ((0, 0), (1, 0), (0, 1), (0, 0))), image)
case("max_pool_of_a_matrix", pooled(lax.max, -np.inf, (2, 2), (1, 1), "VALID"), x)
case("sum_pool_1d", pooled(lax.add, 0, (1, 3, 1), (1, 2, 1), "SAME"), random(2, 9, 4))
case("max_pool_3d", pooled(lax.max, -np.inf, (1, 2, 2, 2, 1), (1, 2, 2, 2, 1), "VALID"), random(1, 4, 4, 4, 3))

ids = np.int32([[0, 2], [1, -1]])
case("take_rows", lambda a, i: a[i], x, ids)
case("take_columns", lambda a, i: a[:, i], x, ids)
case("take_clipped", lambda a, i: jnp.take(a, i, axis=0, mode="clip"), x, np.int32([0, 7, -9]))
case("take_filled", lambda a, i: jnp.take(a, i, axis=1, mode="fill"), x, np.int32([0, 9, 1]))
case("take_of_transposed", lambda a, i: a.transpose(1, 2, 0)[:, i], random(2, 3, 4), np.int32([3, 0]))
case("take_pairs", lambda a, i, j: a[i, j], x, np.int32([0, 2, 1]), np.int32([3, 1, 0]))
case("take_pairs_apart", lambda a, i, j: a[i, :, j], random(3, 2, 4), np.int32([0, 2, 1]), np.int32([3, 1, 0]))
case("take_along_axis", lambda a, i: jnp.take_along_axis(a, i, 1), x, np.int32([[0, 1], [3, 2], [1, 1]]))
case("gather_by_vmap", jax.vmap(lambda a, i: a[i]), random(3, 4, 2), np.int32([1, 3, 0]))
case("dynamic_slice", lambda a, i: lax.dynamic_slice(a, (i, i + 1), (2, 3)), x, np.int32(1))
case("dynamic_slices_by_vmap", lambda a, i: jax.vmap(lambda start: lax.dynamic_slice(a, (start,), (3,)))(i), random(9), np.int32([0, 4, 8]))
case("dynamic_update", lambda a, b, i: lax.dynamic_update_slice(a, b, (i, 1)), x, random(2, 2), np.int32(2))
case("static_update", lambda a, b: lax.dynamic_update_slice(a, b, (1, 2)), x, random(2, 2))
case("set_rows", lambda a, b, i: a.at[i].set(b), x, random(2, 4), np.int32([2, 0]))
case("add_rows", lambda a, b, i: a.at[i].add(b), x, random(3, 4, seed=3), np.int32([2, 0, 2]))
case("multiply_elements", lambda a, i: a.at[i, 1].multiply(3), x, np.int32([0, 2]))
case("extremes_of_rows", lambda a, b, i: (a.at[i].max(b), a.at[i].min(b)), x, random(2, 4), np.int32([2, 0]))
case("set_outside", lambda a, i: a.at[i].set(9.0, mode="drop"), x, np.int32([1, 5, -7]))
case("set_columns", lambda a, b, i: a.at[:, i].set(b), x, random(3, 2), np.int32([3, 0]))
case("segment_sum", lambda a, i: jax.ops.segment_sum(a, i, 4), random(6), np.int32([0, 1, 1, 3, 0, 3]))
case("sort", lambda a: (jnp.sort(a, 0), jnp.sort(a, 1, descending=True), jnp.argsort(a, 1)), x)
case("sort_integers", lambda a: jnp.sort(a, 0), whole(3, 4))
case("sort_by_key", lambda a, b: lax.sort((a, b), num_keys=1), x, y)
case("top_k", lambda a: lax.top_k(a, 2), x)
case("median", lambda a: jnp.median(a, 0), x)


def loop(a: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        carry = jnp.tanh(carry @ jnp.asarray(random(4, 4)) + row)
        return carry, carry * 2

    return lax.scan(step, jnp.zeros(4), a)


case("scan", loop, x)
case("scan_reversed", lambda a: lax.scan(lambda c, row: (c + row, c), jnp.zeros(4), a, reverse=True), x)
case("scan_over_weights", lambda a: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), a, jnp.asarray(random(3, 4, 4)))[0], x)
case("fori_loop", lambda a: lax.fori_loop(0, 5, lambda i, c: c * 0.5 + i, a), x)
case("while_counting", lambda a: lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 2, c[1] * 1.5), (0, a))[1], x)
case("nested_loops", lambda a: lax.fori_loop(0, 2, lambda i, c: lax.fori_loop(0, i + 1, lambda j, d: d + a[j], c), a[0]), x)
case("known_branch", lambda a: lax.fori_loop(0, 3, lambda i, c: lax.cond(i == 1, lambda d: d * 2, lambda d: d + 1, c), a), x)
case("map", lambda a: lax.map(lambda row: row.sum() * row, a), x)
case("associative_scan", lambda a: lax.associative_scan(jnp.multiply, a), random(7, 2))
case("barrier", lambda a: lax.optimization_barrier(a + 1) * 2, x)
case("checkpoint", jax.checkpoint(lambda a: jnp.sin(a) * a), x)
case("custom_jvp", jax.nn.relu6, x)
case("gradient", jax.grad(lambda a: (jnp.tanh(a) ** 2).sum()), x)

for dtype in ("float16", ml_dtypes.bfloat16):
    kind = np.dtype(dtype).name
    case(f"half_{kind}", lambda a: (a + 1, a * a, jnp.tanh(a), jnp.exp(a), a.sum(1), a.mean(0), a.max(1), jax.nn.softmax(a), jax.nn.gelu(a)), random(3, 4, dtype=dtype))
    case(f"half_products_{kind}", lambda a, b: a @ b, random(3, 4, dtype=dtype), random(4, 5, dtype=dtype))
    case(f"half_conv_{kind}", lambda a: convolved()(a, kernel.astype(a.dtype)), random(2, 9, 8, 4, dtype=dtype))
    case(f"half_pool_{kind}", pooled(lax.add, 0, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), random(2, 9, 8, 4, dtype=dtype))
case("bfloat16_constants", lambda a: a + jnp.asarray([1.5, 2.5, -3, 0], "bfloat16"), random(3, 4, dtype=ml_dtypes.bfloat16))
case("product_in_float32", lambda a, b: lax.dot(a, b, preferred_element_type="float32"), random(3, 4, dtype=ml_dtypes.bfloat16), random(4, 5, dtype=ml_dtypes.bfloat16), tolerance=4e-2)
case("unsigned", lambda a: (a + 200, a // 3, a > 7), whole(4, low=0, high=200, dtype="uint8"))
case("random_bits_of_a_known_key", lambda a: a + jax.random.uniform(jax.random.key(0), (3, 4)), x)

with_nan = x.copy()
with_nan[1, 2] = np.nan
bits = np.random.default_rng(0).integers(0, 256, (3, 4)).astype("uint8")
for dtype in ("int32", "int8", "uint8", "uint32"):
    least, divisors = np.iinfo(dtype).min, np.array([0, -1, 3, -7, 1, 0]).astype(dtype)
    dividends = np.array([7, least, least, 100, 0, 0]).astype(dtype)
    case(f"division_by_anything_{dtype}", lambda a, b: (lax.div(a, b), lax.rem(a, b)), dividends, divisors)
    case(f"division_by_known_{dtype}", lambda a, b=divisors: (lax.div(a, b), lax.rem(a, b)), dividends)
for dtype in ("bool", "int8", "uint8", "int16", "float16", ml_dtypes.bfloat16):
    mixed = (bits > 127) if dtype == "bool" else bits.view("int8").astype(dtype)
    case(f"sort_{np.dtype(dtype).name}", lambda a: (jnp.sort(a, 1), jnp.argsort(a, 0)), mixed)
case("top_k_bfloat16", lambda a: lax.top_k(a, 2), x.astype(ml_dtypes.bfloat16))
far = np.float32([3e9, -3e9, 300, -5, 1.9, -1.9, np.nan, np.inf, -np.inf, 2147483520])
for dtype in ("int32", "int8", "uint8"):
    case(f"float_to_{dtype}", lambda a, d=dtype: a.astype(d), far)
    case(f"half_to_{dtype}", lambda a, d=dtype: a.astype(d), far.astype(ml_dtypes.bfloat16))
    case(f"known_float_to_{dtype}", lambda a, d=dtype: a + jnp.asarray(far).astype(d), np.zeros(10, dtype))
case("known_remainder_of_bfloat16", lambda a: a + jnp.fmod(jnp.asarray([5.5, 7.25, -3.5, 1], "bfloat16"), jnp.asarray(2, "bfloat16")), x.astype(ml_dtypes.bfloat16))
case("rounded_to_bfloat16", lambda a: (lax.reduce_precision(a, 8, 7), lax.reduce_precision(a * 2, 8, 23)), x, tolerance=0)
case("nothing_to_reduce", lambda a: (jnp.max(a[:, :0], 1, initial=-3.0), a[:0].sum(0), jnp.sum(a[:, :0])), x)
near_zero = np.float32([0, 1e-10, -1e-7, 1e-4, -1e-2, 0.3, -0.49, 0.51, 2, -0.9, 80])
case("expm1_relative", lambda a: jnp.expm1(a) / jnp.where(a == 0, 1, a), near_zero[:-1])
case("expm1_ends", jnp.expm1, np.float32([np.inf, -np.inf, np.nan, -200]))
case("log1p_relative", lambda a: jnp.log1p(a) / jnp.where(a == 0, 1, a), near_zero)
case("log1p_ends", jnp.log1p, np.float32([np.inf, -1, np.nan, -2]))
case("erfc_relative", lambda a: lax.erfc(a) * jnp.exp(a * a), np.float32([-2, -0.5, 0, 0.1, 1, 2, 4, 5, 8]))
case("erfc_ends", lax.erfc, np.float32([np.inf, -np.inf, np.nan, 30, -30]))
case("nan_is_found", lambda a: (jnp.isnan(a), a == a, jnp.nan_to_num(a), jnp.nanmean(a, 0), jnp.nansum(a)), with_nan)
case("sort_nan", lambda a: (jnp.sort(a, 1), jnp.argsort(a, 1), jnp.sort(a, 1, descending=True), lax.top_k(a, 2)), with_nan)
case("sign_nan", jnp.sign, np.float32([np.nan, -2, 0, 3, np.inf]))
