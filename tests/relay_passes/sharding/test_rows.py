"""A region that is split by rows, columns or batch computes what it did, and says where, and what crosses."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import assume, given, settings, strategies as st
from tvm import relax

from relay_passes.ir import constant, main_function, operations_of, shape_of
from relay_passes.sharding.emit import shard
from relay_passes.sharding.ranges import computed_shares
from relay_passes.sharding.region import Exchange, ShardAxis, ShardError, part_name
from tests.helpers.relax_graphs import assert_same_values, graph, random_inputs, weights
from tests.helpers.sharded_graphs import BOTH, assert_all_placed, assert_splits_like_whole, region_of
from tests.helpers.split_costs import computed_again, transfer_bytes

op = relax.op
Draw = Callable[[st.SearchStrategy[Any]], Any]


def convolution(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    channels = int(x.ty.shape.values[1])
    groups = draw(st.sampled_from([1, 1, 2, channels]))
    out = draw(st.sampled_from([2, 4])) if groups < channels else channels
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    padding = draw(st.tuples(*[st.integers(0, extent - 1) for extent in (*kernel, *kernel)]))
    strides, dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 2))), draw(st.sampled_from([(1, 1), (2, 1)]))
    kernels = weights(out, channels // groups, *kernel)
    convolved = emit(op.nn.conv2d(x, kernels, strides, padding, dilation, groups), name)
    return emit(op.nn.relu(emit(op.add(convolved, weights(1, out, 1, 1)), f"{name}_bias")), f"{name}_relu")


def transposed(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    channels = int(x.ty.shape.values[1])
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.tuples(st.integers(0, kernel - 1), st.just(0), st.integers(0, kernel - 1), st.just(0)))
    output_padding = (draw(st.integers(0, stride - 1)), 0)
    kernels = weights(channels, 2, kernel, 2)
    return emit(op.nn.conv2d_transpose(x, kernels, (stride, 1), padding, output_padding), name)


def pool(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    kernel, stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3))), draw(st.integers(1, 2))
    padding = draw(st.tuples(*[st.integers(0, extent // 2) for extent in (*kernel, *kernel)]))
    kind = draw(st.sampled_from([op.nn.max_pool2d, op.nn.avg_pool2d]))
    options = {"ceil_mode": draw(st.booleans()), "count_include_pad": draw(st.booleans())}
    return emit(kind(x, kernel, (stride, 1), padding, draw(st.sampled_from([(1, 1), (2, 1)])), **options), name)


def resized(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    size = draw(st.tuples(st.integers(4, 20), st.integers(4, 12)))
    return emit(op.image.resize2d(x, size, method=draw(st.sampled_from(["linear", "nearest_neighbor"]))), name)


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


def looked_up(draw: Draw, emit: Any, x: relax.Var, name: str) -> relax.Var:
    rows = int(x.ty.shape.values[2])
    table = np.array(draw(st.lists(st.integers(0, rows - 1), min_size=4, max_size=16)))
    padded = emit(op.nn.pad(x, [0, 0, 0, 0, *draw(st.tuples(*[st.integers(0, 1)] * 4))]), f"{name}_pad")
    gathered = emit(op.take(padded, constant(table), axis=2, mode="fast"), name)
    first = draw(st.integers(0, 1))
    return emit(op.strided_slice(gathered, [2, 3], [first, 1], [100, 100], [draw(st.integers(1, 2)), 1]), f"{name}_cut")


STEPS = [convolution, convolution, convolution, transposed, pool, resized, residual, gated, looked_up]


@st.composite
def networks(draw: Draw) -> tvm.IRModule:
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=4))

    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        x = emit(op.abs(x), "first")
        for place, step in enumerate(steps):
            shape = [int(extent) for extent in x.ty.shape.values]
            assume(min(shape[2:]) >= 4 and max(shape[2:]) < 40)
            x = step(draw, emit, x, f"{step.__name__}_{place}")
        return [emit(op.negative(x), "last")]

    return graph({"x": (4, 2, draw(st.integers(8, 17)), draw(st.integers(8, 11)))}, write)


SHARES = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(
    lambda parts: tuple(part / sum(parts) for part in parts)
)

# What may be drawn and cannot be split.
REFUSED = ("is nothing", "padding alone", "nothing from")


@settings(max_examples=8)
@given(networks(), SHARES, st.sampled_from(["rows", "rows", "rows", "columns", "batch"]), st.data())
def test_what_is_split_computes_the_same(
    module: tvm.IRModule, shares: tuple[float, ...], axis: ShardAxis, data: st.DataObject
) -> None:
    names = region_of(module, shares).names
    first = data.draw(st.integers(0, len(names) - 2))
    region = region_of(module, shares, first, data.draw(st.integers(first + 2, len(names))))
    modules = {"whole": module}
    for exchange in BOTH:
        try:
            sharded = shard(module, region, axis=axis, exchange=exchange)
        except ShardError as error:
            assume(not any(reason in str(error) for reason in REFUSED))
            raise
        assert_all_placed(module, sharded)
        modules[f"split_{len(modules)}"] = sharded.module
    assert_same_values(modules, *random_inputs(module))


def two_convolutions() -> tvm.IRModule:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        value = emit(op.abs(x), "before")
        value = emit(op.nn.conv2d(value, weights(2, 2, 3, 3), padding=(1, 1)), "conv1")
        value = emit(op.nn.relu(value), "relu")
        value = emit(op.nn.conv2d(value, weights(2, 2, 5, 5), 2, padding=(2, 2)), "conv2")
        return [emit(op.negative(value), "behind")]

    return graph({"x": (1, 2, 12, 8)}, write)


@pytest.mark.parametrize("exchange", BOTH)
def test_computed_shares_are_what_the_rewrite_computes(exchange: Exchange) -> None:
    module = two_convolutions()
    region = region_of(module, (0.5, 0.33, 0.17), "conv1", "conv2")
    shares = computed_shares(module, region, axis="rows", exchange=exchange)
    whole, parts = (
        {binding.var.name: shape_of(binding.var)[2] for binding in operations_of(main_function(graph))}
        for graph in (module, shard(module, region, axis="rows", exchange=exchange).module)
    )
    for (name, machine), share in shares.items():
        assert share * whole[name] == pytest.approx(parts[part_name(name, machine)])
    assert len(shares) == 3 * 3


@pytest.mark.parametrize(
    ("shares", "rows_of_first", "rows_of_second"),
    # Seven rows behind strides: 4 and 3 of them would make halves 16 and 12 of 28; at 0.57, 16 are what they should be.
    [((0.5, 0.5), (14, 14), (7, 7)), ((0.57, 0.43), (16, 12), (8, 6))],
)
def test_what_becomes_few_rows_is_dealt_out_by_shares_while_it_has_many(
    shares: tuple[float, ...], rows_of_first: tuple[int, ...], rows_of_second: tuple[int, ...]
) -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        first = emit(op.nn.relu(x), "first")
        second = emit(op.nn.conv2d(first, weights(2, 2, 3, 3), strides=2, padding=(1, 1)), "second")
        return [emit(op.nn.conv2d(second, weights(2, 2, 3, 3), strides=2, padding=(1, 1)), "last")]

    module = graph({"x": (1, 2, 28, 3)}, write)
    sharded = shard(module, region_of(module, shares), axis="rows", exchange="each")
    shapes = {
        binding.var.name: [int(length) for length in binding.var.ty.shape.values]
        for binding in operations_of(main_function(sharded.module))
    }
    assert tuple(shapes[f"first_machine_{machine}"][2] for machine in "ab") == rows_of_first
    assert tuple(shapes[f"second_machine_{machine}"][2] for machine in "ab") == rows_of_second
    assert tuple(shapes[f"last_machine_{machine}"][2] for machine in "ab") == (4, 3)
    assert_splits_like_whole(module, "rows", shares)


def test_a_region_behind_one_that_is_split_already() -> None:
    module = two_convolutions()
    first = shard(module, region_of(module, (0.5, 0.5), "conv1", "relu"), axis="rows", exchange="fused")
    both = shard(first.module, region_of(first.module, (0.4, 0.6), "conv2", "conv2"), axis="rows", exchange="fused")
    # The first region's part of the same value has the name already.
    assert first.machine_of["relu_machine_a"] == "machine-a"
    assert both.machine_of["relu_machine_a_2"] is None
    assert_all_placed(first.module, both)
    assert_same_values({"whole": module, "split": both.module}, *random_inputs(module))


def test_what_cannot_be_split_is_refused() -> None:
    module = two_convolutions()

    for shares, axis, message in (
        ((0.95, 0.05), "rows", "'conv2' has 6 rows for 2 machines: a share of 0.05 of 6 is nothing; take fewer mach"),
        ((0.5, 0.5), "batch", "nothing from 'conv1' to 'conv2' can be split along batch"),
    ):
        with pytest.raises(ShardError, match=message):
            shard(module, region_of(module, shares, "conv1", "conv2"), axis=axis, exchange="fused")


def test_a_tuple_does_not_leave_a_region() -> None:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        norm = emit(op.nn.batch_norm(x, *[weights(2)] * 4, 1, training=False), "norm")
        return [emit(relax.TupleGetItem(norm, 0), "normed")]

    module = graph({"x": (1, 2, 8, 3)}, write)
    for place, message in ((slice(0, 1), "is a tuple, and used behind"), (slice(1, 2), "is from before")):
        with pytest.raises(ShardError, match=message):
            shard(module, region_of(module, (0.5, 0.5), place.start, place.stop), axis="rows", exchange="fused")


Layers = Callable[[Any, relax.Var], relax.Var]


def pooling(emit: Any, x: relax.Var) -> relax.Var:
    return emit(op.nn.max_pool2d(x, (2, 2)), "pool")


def convolutions(emit: Any, x: relax.Var) -> relax.Var:
    wide = emit(op.nn.conv2d(x, weights(3, 2, 3, 3), padding=1), "conv1")
    return emit(op.nn.conv2d(wide, weights(2, 3, 2, 2)), "conv2")


def gate(emit: Any, x: relax.Var) -> relax.Var:
    gated = emit(op.multiply(x, emit(op.mean(x, [2, 3], keepdims=True), "mean")), "gated")
    return emit(op.nn.avg_pool2d(gated, (2, 2)), "pool")


def slices(emit: Any, x: relax.Var) -> relax.Var:
    wide = emit(op.nn.conv2d(x, weights(2, 2, 3, 3), padding=1), "conv")
    return emit(op.strided_slice(wide, [2, 3], [1, 1], [100, 100]), "cut")


def reduction(emit: Any, x: relax.Var) -> relax.Var:
    return emit(op.max(emit(op.nn.max_pool2d(x, (2, 2)), "pool"), [2, 3]), "max")


def bottleneck(emit: Any, x: relax.Var) -> relax.Var:
    few = emit(op.nn.conv2d(x, weights(2, 2, 3, 3), strides=4, padding=1), "few")
    many = emit(op.image.resize2d(few, (9, 9), method="linear"), "many")
    return emit(op.nn.conv2d(many, weights(2, 2, 2, 2)), "last_conv")


NETWORKS: list[Layers] = [pooling, convolutions, gate, slices, reduction, bottleneck]


def network(layers: Layers, length: int) -> tvm.IRModule:
    def write(emit: Any, x: relax.Var) -> list[relax.Var]:
        return [emit(op.negative(layers(emit, emit(op.nn.relu(x), "first"))), "last")]

    return graph({"x": (1, 2, length, length)}, write)


@pytest.mark.parametrize("layers", NETWORKS)
@pytest.mark.parametrize(
    ("shares", "length", "axis"),
    # By its share of ``length``, the second machine has nothing; of what is one shorter it has something.
    [((0.39, 0.22, 0.39), 4, "rows"), ((0.39, 0.22, 0.39), 4, "columns"), ((3 / 7, 1 / 7, 1 / 7, 2 / 7), 6, "rows")],
)
def test_a_machine_without_rows_inside_computes_its_part_of_the_result(
    layers: Layers, shares: tuple[float, ...], length: int, axis: ShardAxis
) -> None:
    assert_splits_like_whole(network(layers, length), axis, shares)


@pytest.mark.parametrize("layers", NETWORKS)
def test_few_rows_are_split_or_refused_by_name(layers: Layers) -> None:
    """Never another error, for 2 to 4 machines."""
    refusals = set()
    for length in range(3, 9):
        module = network(layers, length)
        for machines, exchange in itertools.product((2, 3, 4), BOTH):
            for parts in itertools.product((1, 3, 4), repeat=machines):
                region = region_of(module, [part / sum(parts) for part in parts], "first")
                try:
                    computed = computed_shares(module, region, axis="rows", exchange=exchange)
                except ShardError as error:
                    refusals.add((length, region.shares, str(error)))
                else:
                    assert {machine for _, machine in computed} == set(region.machines)
    assert refusals
    for length, shares, message in refusals:
        result, rows = result_of(layers, length)
        assert f"{result!r} has {rows} rows" in message
        assert any(f"a share of {share:g} " in message for share in shares)


def result_of(layers: Layers, length: int) -> tuple[str, int]:
    """The value by whose rows the machines' parts are counted, and how many it has."""
    if layers is reduction:
        return "pool", length - 1
    return "last", 8 if layers is bottleneck else length - 1


ROW = 2 * 5 * 4
"""The bytes of two channels of five columns in float32."""


def write(emit: Any, x: relax.Var) -> list[relax.Var]:
    value = emit(op.abs(x), "before")
    value = emit(op.nn.conv2d(value, weights(2, 2, 3, 1), padding=(1, 0)), "conv1")
    value = emit(op.nn.conv2d(value, weights(2, 2, 3, 1), padding=(1, 0)), "conv2")
    return [emit(op.negative(value), "behind"), emit(op.exp(value), "other")]


@pytest.mark.parametrize(("exchange", "rows", "again"), [("each", 5, 0), ("fused", 6, 2)])
def test_halos_cross_or_are_computed_again(exchange: Exchange, rows: int, again: int) -> None:
    """Each machine has four rows of the result, and needs ``rows`` of what comes before the region."""
    module = graph({"x": (1, 2, 8, 5)}, write)
    region = region_of(module, (0.5, 0.5), "conv1", "conv2")
    sharded = shard(module, region, axis="rows", exchange=exchange)
    a, b = region.machines
    between = {(a, b): ROW, (b, a): ROW} if exchange == "each" else {}
    received, sent = {(None, name): rows * ROW for name in (a, b)}, {(name, None): 4 * ROW for name in (a, b)}
    assert transfer_bytes(sharded) == received | sent | between
    assert computed_again(sharded, region, module) == {"conv1": again * 2 * 5, "conv2": 0}


def test_a_value_crosses_once_to_each_machine_and_an_input_as_a_whole() -> None:
    def two_sums(emit: Any, x: relax.Var) -> list[relax.Var]:
        total = emit(op.sum(x, [1, 2, 3], keepdims=True), "total")
        return [emit(op.add(x, total), "added"), emit(op.multiply(x, total), "scaled")]

    module = graph({"x": (1, 2, 8, 5)}, two_sums)
    sharded = shard(module, region_of(module, (0.5, 0.5)), axis="rows", exchange="fused")
    transfers = transfer_bytes(sharded)
    assert transfers[None, "machine-a"] == transfers[None, "machine-b"] == 8 * ROW
    assert transfers["machine-a", "machine-b"] == transfers["machine-b", "machine-a"] == 4
    assert transfers["machine-a", None] == 2 * 4 * ROW
