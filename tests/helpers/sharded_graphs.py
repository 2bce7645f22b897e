"""Graphs split inside a layer: beside the whole, and by short names of machines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tvm

from relay_passes.ir import main_function, operations_of
from relay_passes.shards.region import Region, Sharded
from relay_passes.shards.rows import split_rows
from tests.helpers.relax_graphs import assert_same_values, random_inputs

MACHINES = tuple(f"machine-{letter}" for letter in "abcdef")
BOTH = ("fused", "each")


def region_of(
    module: tvm.IRModule, shares: Sequence[float], first: str | int | None = None, last: str | int | None = None
) -> Region:
    """The variables from ``first`` to ``last``, by name or place; all without them."""
    names = [each.var.name for each in operations_of(main_function(module))]
    begin = names.index(first) if isinstance(first, str) else first
    end = names.index(last) + 1 if isinstance(last, str) else last
    return Region(tuple(names[begin:end]), MACHINES[: len(shares)], tuple(shares))


def assert_all_placed(module: tvm.IRModule, sharded: Sharded) -> None:
    """Whatever stands in the region's place has a machine or is a cut or join; nothing else is new."""
    before, after = (
        {binding.var.name for binding in operations_of(main_function(each))} for each in (module, sharded.module)
    )
    assert after - before <= set(sharded.machine_of) <= after
    assert set(sharded.source_of) == set(sharded.machine_of)


def assert_splits_like_whole(
    module: tvm.IRModule,
    axis: int,
    shares: Sequence[float],
    exchanges: Collection[str | tuple[str, ...]] = BOTH,
    first: str | None = None,
    last: str | None = None,
) -> None:
    """What is split along ``axis``, in each of the ways to exchange, computes what the whole does."""
    region = region_of(module, shares, first, last)
    modules = {"whole": module}
    for exchange in exchanges:
        sharded = split_rows(module, region, axis=axis, exchange=exchange)
        assert_all_placed(module, sharded)
        modules[f"split_{len(modules)}"] = sharded.module
    assert_same_values(modules, *random_inputs(module))
