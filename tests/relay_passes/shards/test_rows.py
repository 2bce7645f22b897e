"""A region that is split by rows, columns or batch computes what it did, and says where, and what crosses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from hypothesis import assume, given, settings, strategies as st
from tvm import relax

from tests.helpers.relax_graphs import assert_same_values, graph, random_inputs, weights
from tvm_split.relay_passes.contract import bindings_of, main_function
from tvm_split.relay_passes.rewrite import constant
from tvm_split.relay_passes.shards.region import Region, ShardError
from tvm_split.relay_passes.shards.rows import split_rows

op = relax.op
Draw = Callable[[st.SearchStrategy[Any]], Any]
MACHINES = ("machine-a", "machine-b", "machine-c", "machine-d")


def convolution(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    channels = int(x.ty.shape.values[1])
    groups = draw(st.sampled_from([1, 1, 2, channels]))
    out = draw(st.sampled_from([2, 4])) if groups < channels else channels
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    padding = draw(st.tuples(*[st.integers(0, each - 1) for each in (*kernel, *kernel)]))
    strides, dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 2))), draw(st.sampled_from([(1, 1), (2, 1)]))
    kernels = weights(out, channels // groups, *kernel)
    made = emit(op.nn.conv2d(x, kernels, strides, padding, dilation, groups), name)
    return emit(op.nn.relu(emit(op.add(made, weights(1, out, 1, 1)), f"{name}_bias")), f"{name}_relu")


def transposed(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    channels = int(x.ty.shape.values[1])
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.tuples(st.integers(0, kernel - 1), st.just(0), st.integers(0, kernel - 1), st.just(0)))
    output_padding = (draw(st.integers(0, stride - 1)), 0)
    kernels = weights(channels, 2, kernel, 2)
    return emit(op.nn.conv2d_transpose(x, kernels, (stride, 1), padding, output_padding), name)


def pool(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    kernel, stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3))), draw(st.integers(1, 2))
    padding = draw(st.tuples(*[st.integers(0, each // 2) for each in (*kernel, *kernel)]))
    kind = draw(st.sampled_from([op.nn.max_pool2d, op.nn.avg_pool2d]))
    options = {"ceil_mode": draw(st.booleans()), "count_include_pad": draw(st.booleans())}
    return emit(kind(x, kernel, (stride, 1), padding, draw(st.sampled_from([(1, 1), (2, 1)])), **options), name)


def resized(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    size = draw(st.tuples(st.integers(4, 20), st.integers(4, 12)))
    if draw(st.booleans()):
        mode = draw(st.sampled_from(["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]))
        return emit(op.image.resize2d(x, size, method="linear", coordinate_transformation_mode=mode), name)
    mode = draw(st.sampled_from(["half_pixel", "align_corners", "asymmetric"]))
    rounding = draw(st.sampled_from(["floor", "ceil", "round_prefer_floor", "round_prefer_ceil", "round"]))
    options = {"coordinate_transformation_mode": mode, "rounding_method": rounding}
    return emit(op.image.resize2d(x, size, method="nearest_neighbor", **options), name)


def residual(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    channels = int(x.ty.shape.values[1])
    branch = emit(op.nn.conv2d(x, weights(channels, channels, 3, 3), padding=(1, 1)), name)
    if draw(st.booleans()):
        return emit(op.add(x, branch), f"{name}_add")
    skip = emit(op.concat([branch, x], 1), f"{name}_cat")
    return emit(op.nn.conv2d(skip, weights(2, 2 * channels, 1, 1)), f"{name}_mix")


def gated(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    channels = int(x.ty.shape.values[1])
    kind = draw(st.sampled_from([op.mean, op.max, op.sum]))
    squeezed = emit(kind(x, [2, 3], keepdims=True), name)
    gate = emit(op.nn.conv2d(squeezed, weights(channels, channels, 1, 1)), f"{name}_fc")
    return emit(op.multiply(x, emit(op.sigmoid(gate), f"{name}_sigmoid")), f"{name}_mul")


def normed(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    channels = int(x.ty.shape.values[1])
    vectors = [weights(channels, seed=seed) for seed in range(3)]
    statistics = emit(op.nn.batch_norm(x, *vectors, emit(op.exp(vectors[0]), f"{name}_e"), 1, training=False), name)
    return emit(op.nn.softmax(emit(relax.TupleGetItem(statistics, 0), f"{name}_0"), 1), f"{name}_softmax")


def moved(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    batch, channels, rows, columns = (int(each) for each in x.ty.shape.values)
    ahead = emit(op.permute_dims(x, [0, 2, 3, 1]), name)
    flat = emit(op.reshape(ahead, (batch, rows * columns, channels)), f"{name}_flat")
    product = emit(op.matmul(flat, weights(channels, 2)), f"{name}_product")
    back = emit(op.reshape(product, (batch, rows, columns, 2)), f"{name}_back")
    return emit(op.permute_dims(back, [0, 3, 1, 2]), f"{name}_ahead")


def looked_up(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    rows = int(x.ty.shape.values[2])
    table = np.array(draw(st.lists(st.integers(0, rows - 1), min_size=4, max_size=16)))
    padded = emit(op.nn.pad(x, [0, 0, 0, 0, *draw(st.tuples(*[st.integers(0, 1)] * 4))]), f"{name}_pad")
    taken = emit(op.take(padded, constant(table), axis=2, mode="fast"), name)
    first = draw(st.integers(0, 1))
    return emit(op.strided_slice(taken, [2, 3], [first, 1], [100, 100], [draw(st.integers(1, 2)), 1]), f"{name}_cut")


STEPS = [convolution, convolution, convolution, transposed, pool, resized, residual, gated, normed, moved, looked_up]


@st.composite
def networks(draw: Draw) -> tvm.IRModule:
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=4))

    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        x = emit(op.abs(x), "first")
        for place, step in enumerate(steps):
            shape = [int(each) for each in x.ty.shape.values]
            assume(min(shape[2:]) >= 4 and max(shape[2:]) < 40)
            x = step(draw, emit, x, f"{step.__name__}_{place}")
        return [emit(op.negative(x), "last")]

    return graph({"x": (4, 2, draw(st.integers(8, 17)), draw(st.integers(8, 11)))}, write)


@st.composite
def shares(draw: Draw) -> tuple[float, ...]:
    parts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    return tuple(each / sum(parts) for each in parts)


def region_of(module: tvm.IRModule, shared: tuple[float, ...], first: int = 0, end: int | None = None) -> Region:
    names = [each.var.name for each in bindings_of(main_function(module)) if each.var.name != "outputs"]
    return Region(tuple(names[first:end]), MACHINES[: len(shared)], shared)


# What may be drawn and cannot be split.
REFUSED = ("is nothing", "padding alone", "tuple", "no such axis", "nothing from", "of its layout")


@settings(max_examples=15)
@given(networks(), shares(), st.sampled_from([2, 2, 2, 3, 0]), st.data())
def test_what_is_split_computes_the_same(
    module: tvm.IRModule, shared: tuple[float, ...], axis: int, data: st.DataObject
) -> None:
    count = len(region_of(module, shared).names)
    first = data.draw(st.integers(0, count - 2))
    region = region_of(module, shared, first, data.draw(st.integers(first + 2, count)))
    modules = {"whole": module}
    for exchange in ("fused", "each"):
        try:
            modules[exchange] = split_rows(module, region, axis=axis, exchange=exchange).module
        except ShardError as error:
            assume(not any(reason in str(error) for reason in REFUSED))
            raise
    assert_same_values(modules, *random_inputs(module))
