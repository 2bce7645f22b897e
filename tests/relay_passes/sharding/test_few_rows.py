"""Tensors with few rows for their machines: one may own no row inside a region, but has some of the region's result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax

from relay_passes.sharding.ranges import computed_shares
from relay_passes.sharding.region import ShardAxis, ShardError
from tests.helpers.relax_graphs import graph, weights
from tests.helpers.sharded_graphs import BOTH, assert_splits_like_whole, region_of

op = relax.op
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
