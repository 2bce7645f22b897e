"""What is seen of a split before anything is rewritten: what the rewrite then computes, and what it refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import prod

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relay_passes.ir import main_function, operations_of
from relay_passes.shards.channels import require_channels, split_channels
from relay_passes.shards.region import ShardError, part_name
from relay_passes.shards.rows import computed_rows, split_rows
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
    seen = computed_rows(module, region, axis=2, exchange=exchange)
    whole, parts = elements(module), elements(split_rows(module, region, axis=2, exchange=exchange).module)
    for name in ("conv1", "pool", "conv2", "last"):
        for machine in region.machines:
            assert seen[name, machine] * whole[name] == pytest.approx(parts[part_name(name, machine)])
    assert sum(seen["gate", machine] for machine in region.machines) == pytest.approx(1.0)
    assert not any(name == "before" for name, _ in seen)


def test_what_is_refused_is_refused_ahead_in_the_same_words(capfd: pytest.CaptureFixture[str]) -> None:
    module = network()
    region = region_of(module, (0.95, 0.05), "conv1", "last")
    for look, split, options in (
        (computed_rows, split_rows, {"axis": 2, "exchange": "fused"}),
        (require_channels, split_channels, {"unit_by": "channels", "exchange": "fused"}),
        (require_channels, split_channels, {"unit_by": "heads", "exchange": "fused"}),
    ):
        said = []
        for each in (look, split):
            with pytest.raises(ShardError) as caught:
                each(module, region, **options)  # type: ignore[operator]
            said.append(str(caught.value))
            del caught
        assert said[0] == said[1]
    gc.collect()
    assert capfd.readouterr().err == ""  # TVM complains there of a builder that is left open


def test_what_can_be_dealt_out_is_not_refused() -> None:
    module = network()
    require_channels(module, region_of(module, (0.5, 0.5), "conv1", "conv2"), unit_by="channels", exchange="each")
