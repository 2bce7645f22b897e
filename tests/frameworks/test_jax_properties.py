"""Random small networks of JAX, whose axes end up in every order, against JAX: outputs, and every layer's values."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax import lax

from tests.helpers.frontends.comparison import assert_close, run
from tests.helpers.frontends.contract import assert_keeps_contract
from tvm_split.compiler.verification import first_differing_layer
from tvm_split.frontends import load_model

Step = Callable[[Any, Any, int], Any]
"""A value, another of any shape, and a number that says how."""


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


def unary(x: Any, operand: Any, how: int) -> Any:
    return [jnp.tanh, jnp.abs, jax.nn.relu, jnp.sin, jax.nn.sigmoid, jnp.negative][how % 6](x)


def binary(x: Any, operand: Any, how: int) -> Any:
    operand = operand if operand.shape == x.shape else operand.mean()
    return [jnp.add, jnp.multiply, jnp.maximum, jnp.subtract, lambda a, b: jnp.where(a > b, a, 2 * b)][how % 5](
        x, operand
    )


def outer(x: Any, operand: Any, how: int) -> Any:
    """Along an axis of its own, or with one element for all others."""
    axis = how % x.ndim if x.ndim else 0
    return x + jnp.expand_dims(x.max(axis) if x.ndim else x, axis) if x.ndim else x[None] * numbers(3)


def transposed(x: Any, operand: Any, how: int) -> Any:
    return x.transpose(np.random.default_rng(how).permutation(x.ndim))


def reshaped(x: Any, operand: Any, how: int) -> Any:
    if x.ndim < 2 or how % 3 == 0:
        return jnp.expand_dims(x, how % (x.ndim + 1)) if x.ndim < 4 else x.reshape(x.shape[0], -1)
    axis = how % (x.ndim - 1)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def reduced(x: Any, operand: Any, how: int) -> Any:
    if not x.ndim:
        return x
    return [jnp.sum, jnp.max, jnp.mean, jnp.min][how % 4](x, axis=how % x.ndim, keepdims=how % 3 == 0)


def part(x: Any, operand: Any, how: int) -> Any:
    if not x.ndim:
        return x
    axis = how % x.ndim
    return lax.slice_in_dim(x, 0, max(1, x.shape[axis] - how % 3), 1 + how % 2, axis)


def joined(x: Any, operand: Any, how: int) -> Any:
    return jnp.concatenate([x, 2 * x], how % x.ndim) if x.ndim and x.size < 200 else x


def flipped_and_padded(x: Any, operand: Any, how: int) -> Any:
    if not x.ndim or x.size > 200:
        return x
    widths = [(how % 2, (how + axis) % 2) for axis in range(x.ndim)]
    return jnp.pad(jnp.flip(x, how % x.ndim), widths)


def product(x: Any, operand: Any, how: int) -> Any:
    if not x.ndim:
        return x
    axis = how % x.ndim
    return jnp.tanh(jnp.tensordot(x, numbers(x.shape[axis], 1 + how % 3), axes=(axis, 0)))


def broadcast(x: Any, operand: Any, how: int) -> Any:
    if x.ndim > 3 or x.size > 100:
        return x
    axis = how % (x.ndim + 1)
    return jnp.repeat(jnp.expand_dims(x, axis), 2, axis)


def taken(x: Any, operand: Any, how: int) -> Any:
    return jnp.take(x, np.array([0, x.shape[how % x.ndim] - 1, 0]), axis=how % x.ndim) if x.ndim and x.size < 200 else x


def ordered(x: Any, operand: Any, how: int) -> Any:
    if not x.ndim:
        return x
    axis = how % x.ndim
    return [jnp.sort, jnp.cumsum, lambda x, axis: lax.cummax(x, axis), lambda x, axis: jnp.argsort(x, axis) * x][
        how % 4
    ](x, axis=axis)


def replaced(x: Any, operand: Any, how: int) -> Any:
    if not x.ndim:
        return x
    axis, last = how % x.ndim, x.shape[how % x.ndim] - 1
    first = jnp.clip(operand.sum().astype("int32"), 0, last)  # known only when the network runs
    row = lax.dynamic_slice_in_dim(x, first, 1, axis)
    return [
        lax.dynamic_update_slice_in_dim(x, row * 2, last, axis),
        lax.dynamic_update_slice_in_dim(x, row * 2, first, axis),
        jnp.moveaxis(jnp.moveaxis(x, axis, 0).at[np.array([last, 0])].add(1.5), 0, axis),
        jnp.take(x, jnp.stack([first, first * 0]), axis=axis),
    ][how % 4]


STEPS: Sequence[Step] = (
    unary, binary, outer, transposed, reshaped, reduced, part, joined, flipped_and_padded, product, broadcast, taken,
    ordered, replaced,
)  # fmt: skip


def network(choices: Sequence[tuple[int, int]]) -> Callable[..., Any]:
    def compute(x: Any, y: Any) -> Any:
        values = [x, y]
        for which, how in choices:
            values.append(STEPS[which](values[-1 - how % 2], values[how % len(values)], how))
        return values[-1], values[-2] + 1, values[len(values) // 2]

    return compute


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 40)), min_size=2, max_size=9))
def test_random_networks_have_the_answers_of_jax(choices: list[tuple[int, int]]) -> None:
    inputs = numbers(2, 3, 4), numbers(2, 3, 1, 4)
    compute = network(choices)
    model = load_model(compute, inputs)
    assert_keeps_contract(model)
    outputs = run(model, inputs)
    for actual, right in zip(outputs, jax.jit(compute)(*inputs), strict=True):
        assert actual.shape == right.shape
        assert_close(actual, np.asarray(right), 1e-4)
    assert model.layers
    assert first_differing_layer(model, model.reference, inputs) is None


def test_operations_along_an_axis_that_only_repeats() -> None:
    def along(x: Any, axis: int) -> list[Any]:
        b = jnp.repeat(jnp.expand_dims(jnp.abs(x), axis), 3, axis)
        weight = numbers(3, 2)
        first = jnp.argmax(x.ravel()) % 3
        moved = [step(b, x, how) for step in (part, flipped_and_padded, taken, ordered, replaced, joined)
                 for how in range(axis, 17, b.ndim)]  # fmt: skip
        return [
            *moved,
            *(b.sum(axis), b.max(axis), b.prod(axis), jnp.argmax(b, axis), jnp.argmin(b, axis), b.reshape(6, -1) * 2),
            *lax.top_k(jnp.moveaxis(b, axis, -1), 2),
            jnp.tensordot(b, weight, ((axis,), (0,))),
            jnp.take_along_axis(b, jnp.argsort(b, axis), axis),
            lax.dynamic_slice_in_dim(b, first, 2, axis),
            lax.reduce_window(b, 0.0, lax.add, [2 if place == axis else 1 for place in range(4)], [1] * 4, "SAME"),
            lax.pad(b, 0.0, [(1, -1, 1)] * b.ndim),
            b.at[:, first].multiply(2.0),
        ]

    x = numbers(2, 3, 4)

    def compute(x: Any) -> Any:
        return [along(x, axis) for axis in (0, 3)]

    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(compute)(x))]
    for actual, right in zip(run(load_model(compute, (x,)), (x,)), expected, strict=True):
        assert_close(actual, right, 1e-4)


@settings(max_examples=15)
@given(st.data())
def test_random_convolutions_and_pools_have_the_answers_of_jax(data: st.DataObject) -> None:
    groups, small = data.draw(st.sampled_from([1, 2])), st.integers(1, 3)
    window, strides, dilation, spread = ([data.draw(small) for _ in range(2)] for _ in range(4))
    padding = [(data.draw(st.integers(-1, 4)), data.draw(st.integers(-1, 4))) for _ in range(2)]
    layout = data.draw(st.permutations("NHWC")), data.draw(st.permutations("HWIO")), data.draw(st.permutations("NHWC"))
    sizes = {"N": 2, "C": 4, "H": 9, "W": 8}
    kernel_sizes = {"O": 6, "I": 4 // groups, "H": window[0], "W": window[1]}
    image = numbers(*(sizes[axis] for axis in layout[0]))
    kernel = numbers(*(kernel_sizes[axis] for axis in layout[1]))
    is_pooled = data.draw(st.booleans())

    def compute(x: Any) -> Any:
        x = lax.conv_general_dilated(
            x, kernel, strides, padding, spread, dilation, tuple("".join(axes) for axes in layout), groups
        )
        if is_pooled and math.prod(x.shape):
            return x, lax.reduce_window(x, 0.0, lax.add, (1, 2, 1, 2), (1, 2, 1, 1), "SAME")
        return x

    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(compute)(image))]
    if any(0 in array.shape for array in expected):
        return
    model = load_model(compute, (image,))
    for actual, right in zip(run(model, (image,)), expected, strict=True):
        assert_close(actual, right, 1e-4)
    assert first_differing_layer(model, model.reference, (image,)) is None
