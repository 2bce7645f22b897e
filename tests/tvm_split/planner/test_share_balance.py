"""Shares by times and by memory: always together 1, to hundredths, and moved towards who can take more."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tests.helpers.planner.steps import step
from tvm_split.planner.problem import Evaluation, MachineLoad, Sharding, Stage
from tvm_split.planner.share_balance import in_proportion, lightened, rebalanced, rounded
from tvm_split.planner.step_graph import StepGraph

A, B = "machine-a", "machine-b"


def shared(**shares: float) -> Stage:
    machines = tuple(f"machine-{letter}" for letter in shares)
    return Stage(machines, ("conv",), tuple(shares.values()), "stage_0", Sharding("channels"))


def load(machine: str, weight_bytes: float) -> MachineLoad:
    return MachineLoad(machine, 0, 0, 0, weight_bytes, 0, 0, 0, 0, 1)


def test_a_machine_of_half_the_time_gets_twice_the_share():
    assert in_proportion([1.0, 2.0]) == pytest.approx([2 / 3, 1 / 3])


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_rounded_shares_are_hundredths_that_make_a_whole(parts):
    found = rounded([part / sum(parts) for part in parts])
    assert sum(found) == pytest.approx(1)
    assert all(share > 0 and share * 100 == pytest.approx(round(share * 100)) for share in found)


def test_who_took_longer_gets_less():
    own = [replace(step(name, name, 0.0, took), stage="stage_0") for name, took in ((A, 3.0), (B, 1.0))]
    graph = StepGraph((*own, step("other", B, 9.0)), ())
    assert rebalanced(shared(a=0.5, b=0.5), graph).shares == (0.25, 0.75)


def test_whose_memory_is_too_small_gets_what_fits_and_others_the_rest():
    evaluation = Evaluation(0, 0, (load(A, 200), load(B, 100)), "")
    assert lightened(shared(a=0.5, b=0.5), evaluation, {A: 100, B: 1000}).shares == (0.24, 0.76)
    crowded = shared(a=0.5, b=0.5)
    assert lightened(crowded, evaluation, {A: 100, B: 50}) == crowded


def test_a_machine_with_nothing_to_hold_takes_what_is_too_much_for_another():
    """By its share it computes nothing, as of a slice that lies in the other's rows."""
    evaluation = Evaluation(0, 0, (load(A, 200),), "")
    assert lightened(shared(a=0.5, b=0.5), evaluation, {A: 100, B: 1000}).shares == (0.24, 0.76)


def test_a_stage_of_one_machine_stays_as_it_is():
    alone = Stage((A,), ("conv",), name="stage_0")
    assert rebalanced(alone, StepGraph((), ())) is alone
    assert lightened(alone, Evaluation(0, 0, (load(A, 200),), ""), {A: 100}) is alone
