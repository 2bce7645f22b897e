"""Products and convolutions for CUDA against float64: their source, run on a CPU with tensor core instructions.

`make test` runs one case per rule; the others are slow, because each compiles C++. Padding, residuals and other dtypes
are in the tests of the CPU's kernels, which run on this target as well.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tvm import relax

from tests.helpers.schedules.convolutions import product
from tests.helpers.schedules.emulated_gpu import evaluate
from tests.helpers.schedules.gpu_kernels import HALVES, halves, needs_headers, slow
from tests.helpers.schedules.properties import exact
from tests.helpers.schedules.schedule_harness import assert_close, normal

pytestmark = needs_headers

FRAGMENT = 16
"""The positions of an image that a tensor core computes at a time."""


def check_product(left, right, dtype, chosen):
    actual, rules = evaluate(product(dtype), [left, right])
    right_answer = np.maximum(left.astype("float64") @ right.astype("float64"), 0)
    assert_close(actual, right_answer, {"float32": 1e-4, **HALVES}[dtype])
    assert rules <= {chosen, "elementwise"}


@pytest.mark.slow
@settings(max_examples=5)
@given(
    batch=st.sampled_from([((), ()), ((3,), ()), ((2, 1), (3,))]),
    rows=st.sampled_from([16, 17, 130]),
    depth=st.sampled_from([16, 50, 300]),
    columns=st.sampled_from([16, 17, 130]),
    dtype=halves,
)
def test_products_on_tensor_cores(batch, rows, depth, columns, dtype):
    left, right = normal(0, *batch[0], rows, depth), normal(1, *batch[1], depth, columns)
    check_product(left, right, dtype, "tensor_core")


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype", "chosen"),
    [
        (1, 1500, 70, "float32", "matmul"),
        (40, 1500, 35, "float32", "matmul"),
        (40, 1500, 35, "float16", "tensor_core"),
        *slow(
            (1, 1500, 70, "bfloat16", "matmul"), (3, 50, 130, "float16", "matmul"),
            (130, 130, 2, "bfloat16", "matmul"), (130, 130, 2, "float32", "matmul"),
        ),
    ],
)  # fmt: skip
def test_products_whose_sums_are_in_slices(rows, depth, columns, dtype, chosen):
    check_product(normal(0, rows, depth), normal(1, depth, columns), dtype, chosen)


def check_convolution(x, weight, half=None, transposed=False, **attributes):
    """Compare the ReLU of a convolution with torch's in float64, with operands in ``half`` if that is given."""
    name = f"conv{x.ndim - 2}d"

    def graph(builder, data):
        operands = data, relax.const(weight)
        if half is not None:
            operands = [builder.emit(relax.op.astype(operand, half)) for operand in operands]
        operator = getattr(relax.op.nn, f"{name}_transpose" if transposed else name)
        return builder.emit(relax.op.nn.relu(builder.emit(operator(*operands, out_dtype="float32", **attributes))))

    actual, chosen = evaluate(graph, [x])
    operator = getattr(torch.nn.functional, f"conv_transpose{x.ndim - 2}d" if transposed else name)
    named = {"stride" if key == "strides" else key: value for key, value in attributes.items()}
    right_answer = operator(exact(x), exact(weight), **named).relu().numpy()
    assert_close(actual, right_answer, HALVES[half] if half else 1e-4)
    if half is None:
        assert chosen <= {"conv2d", "depthwise_conv2d"}
    else:
        fills_a_fragment = right_answer[:, 0].size >= FRAGMENT
        assert chosen <= {"tensor_core" if fills_a_fragment else "conv2d", "elementwise"}


@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        ((2, 19, 9, 9), (20, 19, 3, 3)),
        ((2, 8, 7, 7), (8, 1, 3, 3)),
        ((1, 16, 7, 7), (2, 8, 3, 3)),
        ((2, 8, 7, 7), (24, 4, 3, 3)),
    ],
)
def test_convolutions(shape, weights):
    attributes = {"padding": [1, 1], "strides": [2, 2], "groups": shape[1] // weights[1]}
    check_convolution(normal(0, *shape), normal(1, *weights), **attributes)


@pytest.mark.slow
@settings(max_examples=36)
@given(
    axes=st.sampled_from([1, 2, 2, 3]),
    kind=st.sampled_from(["dense", "half", "transposed", "grouped", "depthwise"]),
    inputs=st.sampled_from([16, 24, 33]),
    outputs=st.sampled_from([2, 16, 40]),
    kernel=st.lists(st.sampled_from([1, 2, 3, 5]), min_size=3, max_size=3),
    strides=st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3),
    dilation=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    more=st.booleans(),
    half=halves,
)
def test_any_convolution(axes, kind, inputs, outputs, kernel, strides, dilation, padding, more, half):
    kernel, strides, dtype = kernel[:axes], strides[:axes], half if kind == "half" else None
    groups = {"grouped": 2, "depthwise": inputs}.get(kind, 1)
    if kind == "grouped":
        inputs += inputs % 2
    outputs = max(outputs, 16) if kind == "half" else inputs * (1 + more) if kind == "depthwise" else outputs
    x = normal(0, 2, inputs, *(13, 10, 9)[:axes])
    transposed = kind == "transposed"
    weight = normal(1, *((inputs, outputs) if transposed else (outputs, inputs // groups)), *kernel)
    attributes = {"strides": strides, "padding": [padding] * axes, "dilation": [dilation] * axes, "groups": groups}
    if transposed:
        attributes["output_padding"] = [int(more and stride > 1) for stride in strides]
    check_convolution(x, weight, dtype, transposed, **attributes)
