"""The shares that machines would compute, before anything is rewritten."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of
from relay_passes.sharding.emit import computed_shares, shard
from relay_passes.sharding.region import part_name
from tests.helpers.relax_graphs import graph, weights
from tests.helpers.sharded_graphs import region_of


def network() -> tvm.IRModule:
    def write(emit: Callable[..., relax.Var], x: relax.Var) -> list[relax.Var]:
        before = emit(op.nn.relu(x), "before")
        conv1 = emit(op.nn.conv2d(before, weights(4, 4, 3, 3), padding=1), "conv1")
        pool = emit(op.nn.max_pool2d(conv1, (2, 2), (2, 2)), "pool")
        conv2 = emit(op.nn.conv2d(pool, weights(4, 4, 3, 3), padding=1), "conv2")
        gate = emit(op.mean(conv2, (2, 3), keepdims=True), "gate")
        return [emit(op.multiply(conv2, gate), "last")]

    return graph({"x": (1, 4, 12, 8)}, write)


def elements(module: tvm.IRModule) -> dict[str, int]:
    return {each.var.name: prod(map(int, each.var.ty.shape.values)) for each in operations_of(main_function(module))}


@pytest.mark.parametrize("exchange", ["fused", "each"])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.33, 0.17)])
def test_the_shares_seen_ahead_are_what_the_rewrite_computes(exchange: str, shares: tuple[float, ...]) -> None:
    module = network()
    region = region_of(module, shares, "conv1", "last")
    seen = computed_shares(module, region, axis="rows", exchange=exchange)
    whole, parts = elements(module), elements(shard(module, region, axis="rows", exchange=exchange).module)
    for name in ("conv1", "pool", "conv2", "last"):
        for machine in region.machines:
            assert seen[name, machine] * whole[name] == pytest.approx(parts[part_name(name, machine)])
    assert sum(seen["gate", machine] for machine in region.machines) == pytest.approx(1.0)
    assert not any(name == "before" for name, _ in seen)
