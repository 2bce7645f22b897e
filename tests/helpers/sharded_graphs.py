"""Graphs split inside a layer, compared with the whole graph; their machines have short names."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import tvm

from relay_passes.ir import main_function, operations_of
from relay_passes.sharding.emit import shard
from relay_passes.sharding.region import Exchange, Region, ShardAxis, Sharded, ShardError
from tests.helpers.relax_graphs import assert_same_values, graph, random_inputs

MACHINES = tuple(f"machine-{letter}" for letter in "abcdef")
BOTH: tuple[Exchange, ...] = ("fused", "each")


def region_of(
    module: tvm.IRModule, shares: Sequence[float], first: str | int | None = None, last: str | int | None = None
) -> Region:
    """Return the variables from ``first`` to ``last``, by name or position; without them, all variables."""
    names = [operation.var.name for operation in operations_of(main_function(module))]
    begin = names.index(first) if isinstance(first, str) else first
    end = names.index(last) + 1 if isinstance(last, str) else last
    return Region(tuple(names[begin:end]), MACHINES[: len(shares)], tuple(shares))


def assert_all_placed(module: tvm.IRModule, sharded: Sharded) -> None:
    """Assert that every operation in place of the region has a machine or is a slice or gather; nothing else is new."""
    before, after = (
        {binding.var.name for binding in operations_of(main_function(ir_module))}
        for ir_module in (module, sharded.module)
    )
    assert after - before <= set(sharded.machine_of) <= after
    assert set(sharded.source_of) == set(sharded.machine_of)


def assert_splits_like_whole(
    module: tvm.IRModule,
    axis: ShardAxis,
    shares: Sequence[float],
    exchanges: Collection[Exchange] = BOTH,
    first: str | None = None,
    last: str | None = None,
) -> None:
    """Assert that the graph split along ``axis``, with each kind of exchange, computes what the whole graph does."""
    region = region_of(module, shares, first, last)
    modules = {"whole": module}
    for exchange in exchanges:
        sharded = shard(module, region, axis=axis, exchange=exchange)
        assert_all_placed(module, sharded)
        modules[f"split_{len(modules)}"] = sharded.module
    assert_same_values(modules, *random_inputs(module))


def refusal(expression: Callable[[Any], Any], axis: ShardAxis = "rows", shape: Sequence[int] = (2, 2, 8, 8)) -> str:
    """Return the message with which one operation on an image is refused."""
    module = graph({"x": shape}, lambda emit, x: [emit(expression(x), "layer")])
    with pytest.raises(ShardError) as caught:
        shard(module, region_of(module, (0.5, 0.5)), axis=axis, exchange="fused")
    return str(caught.value)
