"""Plans for micro-batches of several sizes."""

import dataclasses

import pytest

from tests.helpers.placement.predictions import machine_prediction, prediction
from tvm_split.errors import NoPlanError, PlanError
from tvm_split.placement.plan import Plan
from tvm_split.planning.sizes import plan_sizes

PERIODS = {1: 0.010, 2: 0.016, 4: 0.036}
"""The period by micro-batch size: 100, 125 and 111 samples a second."""


def load(size):
    return size  # the planner only passes the loaded model on


def sized(size, objective="throughput"):
    expected = prediction((machine_prediction("machine-a", PERIODS[size]),))
    return Plan("net", objective, "measured", (), (), dataclasses.replace(expected, latency_seconds=0.02 * size))


def test_most_samples_a_second_first():
    sized_plans = plan_sizes([1, 2, 4], load, sized)
    assert [sized_plan.size for sized_plan in sized_plans] == [2, 4, 1]
    assert [sized_plan.model for sized_plan in sized_plans] == [2, 4, 1]
    assert sized_plans[0].samples_per_second == pytest.approx(125)


def test_least_latency_first():
    sized_plans = plan_sizes([4, 2, 1], load, lambda size: sized(size, "latency"))
    assert [sized_plan.size for sized_plan in sized_plans] == [1, 2, 4]


def test_sizes_without_a_plan_are_left_out():
    def some(size):
        if size == 2:
            raise NoPlanError("needs 12 GB")
        return sized(size)

    assert [sized_plan.size for sized_plan in plan_sizes([1, 2, 4], load, some)] == [4, 1]
    with pytest.raises(PlanError, match="of size 2: needs 12 GB"):
        plan_sizes([2], load, some)


@pytest.mark.parametrize("sizes", [[], [0, 1], [-1], [1, 2, 1]])
def test_sizes_that_are_none(sizes):
    with pytest.raises(PlanError, match="different whole numbers"):
        plan_sizes(sizes, load, sized)


def test_a_plan_without_prediction():
    with pytest.raises(PlanError, match="by hand has no prediction"):
        plan_sizes([1], load, lambda size: dataclasses.replace(sized(size), prediction=None))
