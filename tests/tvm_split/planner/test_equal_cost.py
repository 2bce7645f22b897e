from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from tests.helpers.planner.layer_graphs import graph
from tvm_split.cluster.machine import Machine
from tvm_split.errors import PlanError
from tvm_split.planner.equal_cost import stages_of_equal_cost


def chain(count: int, independent: tuple[str, ...] = ()):
    names = [f"layer{index}" for index in range(count)]
    return graph({name: names[index - 1 : index] if index else [] for index, name in enumerate(names)}, independent)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_slowest_stage_is_as_fast_as_it_can_be(costs: list[int], threads: list[int]) -> None:
    threads = threads[: len(costs)]
    layers = chain(len(costs))
    machines = [Machine(f"machine-{index}", count) for index, count in enumerate(threads)]
    seconds = {name: float(cost) for name, cost in zip(layers.layers, costs, strict=True)}
    stages = stages_of_equal_cost(layers, seconds, machines)
    assert [stage.machine for stage in stages] == [machine.name for machine in machines]
    assert tuple(layer for stage in stages for layer in stage.layers) == layers.layers
    found = max(sum(seconds[layer] for layer in stage.layers) / n for stage, n in zip(stages, threads, strict=True))
    cuts = itertools.combinations(range(1, len(costs)), len(threads) - 1)
    best = min(
        max(sum(costs[a:b]) / n for (a, b), n in zip(itertools.pairwise((0, *cut, len(costs))), threads, strict=True))
        for cut in cuts
    )
    assert found == pytest.approx(best)


def test_a_table_makes_no_stage_of_its_own() -> None:
    layers = chain(3, independent=("layer0",))
    stages = stages_of_equal_cost(layers, {"layer0": 9.0, "layer1": 1.0, "layer2": 1.0}, [Machine("a"), Machine("b")])
    assert [stage.layers for stage in stages] == [("layer0", "layer1"), ("layer2",)]


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match=r"4 stages were asked for, but the model can be cut into 3 at most"):
        stages_of_equal_cost(chain(3), dict.fromkeys(["layer0", "layer1", "layer2"], 1.0), [*map(Machine, "abcd")])
