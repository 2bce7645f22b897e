"""Transferred bytes and recomputed operations of a split that can be counted by hand."""

from __future__ import annotations

from typing import Any

from tvm import relax

from relay_passes.sharding.emit import shard
from tests.helpers.relax_graphs import graph, weights
from tests.helpers.sharded_graphs import region_of
from tests.helpers.split_costs import computed_again, crossing_bytes

op = relax.op
ROW = 2 * 5 * 4
"""The bytes of two channels of five columns in float32."""


def write(emit: Any, x: relax.Var) -> list[relax.Var]:
    value = emit(op.abs(x), "before")
    value = emit(op.nn.conv2d(value, weights(2, 2, 3, 1), padding=(1, 0)), "conv1")
    value = emit(op.nn.conv2d(value, weights(2, 2, 3, 1), padding=(1, 0)), "conv2")
    return [emit(op.negative(value), "behind"), emit(op.exp(value), "other")]


def test_halos_cross_and_nothing_is_computed_again() -> None:
    module = graph({"x": (1, 2, 8, 5)}, write)
    region = region_of(module, (0.5, 0.5), "conv1", "conv2")
    exchanged = shard(module, region, axis="rows", exchange="each")
    assert crossing_bytes(exchanged) == {
        (None, "machine-a"): 5 * ROW,
        (None, "machine-b"): 5 * ROW,
        ("machine-a", "machine-b"): ROW,
        ("machine-b", "machine-a"): ROW,
        ("machine-a", None): 4 * ROW,
        ("machine-b", None): 4 * ROW,
    }
    assert computed_again(exchanged, region, module) == {"conv1": 0, "conv2": 0}


def test_fused_tiles_compute_halos_again() -> None:
    module = graph({"x": (1, 2, 8, 5)}, write)
    region = region_of(module, (0.5, 0.5), "conv1", "conv2")
    fused = shard(module, region, axis="rows", exchange="fused")
    assert crossing_bytes(fused) == {
        (None, "machine-a"): 6 * ROW,
        (None, "machine-b"): 6 * ROW,
        ("machine-a", None): 4 * ROW,
        ("machine-b", None): 4 * ROW,
    }
    assert computed_again(fused, region, module) == {"conv1": 2 * 2 * 5, "conv2": 0}


def test_a_value_crosses_once_to_each_machine_and_an_input_as_a_whole() -> None:
    def two_sums(emit: Any, x: relax.Var) -> list[relax.Var]:
        total = emit(op.sum(x, [1, 2, 3], keepdims=True), "total")
        return [emit(op.add(x, total), "added"), emit(op.multiply(x, total), "scaled")]

    module = graph({"x": (1, 2, 8, 5)}, two_sums)
    sharded = shard(module, region_of(module, (0.5, 0.5)), axis="rows", exchange="fused")
    transfers = crossing_bytes(sharded)
    assert transfers[None, "machine-a"] == transfers[None, "machine-b"] == 8 * ROW
    assert transfers["machine-a", "machine-b"] == transfers["machine-b", "machine-a"] == 4
    assert transfers["machine-a", None] == 2 * 4 * ROW
