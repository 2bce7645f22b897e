"""Plans by simple rules."""

import itertools

import pytest
from hypothesis import given, strategies as st

from tests.helpers.placement.layer_graphs import graph
from tests.helpers.placement.profiles import A, B, chain_problem, chain_profile
from tvm_split.cluster.machine import Machine
from tvm_split.errors import PlanError
from tvm_split.placement.baselines import (
    EQUAL_LAYERS,
    EQUAL_PARAMETERS,
    ONE_MACHINE,
    baseline_stages,
    proportional_cuts,
    stages_of_equal_cost,
)


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=12).flatmap(
        lambda weights: st.tuples(st.just(weights), st.lists(st.floats(0.01, 100), min_size=1, max_size=len(weights)))
    )
)
def test_every_part_gets_something(case):
    weights, shares = case
    cuts = proportional_cuts(weights, shares)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(weights), len(shares) + 1)
    assert all(start < end for start, end in itertools.pairwise(cuts))


def placed(stages):
    return [(stage.machines, len(stage.layers)) for stage in stages]


def test_the_usual_ways():
    profile = chain_profile({A: [0.001] * 4, B: [0.001] * 4})
    problem = chain_problem(profile)
    layers = {"layer_0": 1, "layer_1": 1, "layer_2": 1, "layer_3": 3}
    baselines = baseline_stages(problem, layers)
    assert placed(baselines[f"{ONE_MACHINE}, {A}"]) == [((A,), 4)]
    assert placed(baselines[f"{ONE_MACHINE}, {B}"]) == [((B,), 4)]
    assert placed(baselines[EQUAL_LAYERS]) == [((A,), 3), ((B,), 1)]
    assert placed(baselines[EQUAL_PARAMETERS]) == [((A,), 2), ((B,), 2)]


@pytest.mark.parametrize("seconds", [{A: [0.001] * 3}, {A: [0.001], B: [0.001]}])
def test_where_nothing_can_be_split(seconds):
    problem = chain_problem(chain_profile(seconds))
    baselines = baseline_stages(problem, {piece.name: 1 for piece in problem.pieces})
    assert list(baselines) == [f"{ONE_MACHINE}, {machine}" for machine in seconds]


def chain(count: int, independent: tuple[str, ...] = ()):
    names = [f"layer{index}" for index in range(count)]
    return graph({name: names[index - 1 : index] if index else [] for index, name in enumerate(names)}, independent)


def test_a_table_makes_no_stage_of_its_own() -> None:
    layers = chain(3, independent=("layer0",))
    stages = stages_of_equal_cost(layers, {"layer0": 9.0, "layer1": 1.0, "layer2": 1.0}, [Machine("a"), Machine("b")])
    assert [stage.layers for stage in stages] == [("layer0", "layer1"), ("layer2",)]


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match=r"4 stages were asked for, but the model can be cut into 3 at most"):
        stages_of_equal_cost(chain(3), dict.fromkeys(["layer0", "layer1", "layer2"], 1.0), [*map(Machine, "abcd")])
