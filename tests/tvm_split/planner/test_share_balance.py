"""Shares by times and by memory: always together 1, to hundredths, and moved towards who can take more."""

import pytest
from hypothesis import given, strategies as st

from tvm_split.planner.parts import Part, PlanParts
from tvm_split.planner.problem import Evaluation, MachineLoad, Sharding, Stage
from tvm_split.planner.share_balance import in_proportion, lightened, rebalanced, rounded

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
    took = (("a_0", A, "stage_0", 3.0), ("b_0", B, "stage_0", 1.0), ("other", B, "stage_1", 9.0))
    parts = [
        Part(name, stage=stage, machine=machine, seconds=0, together_seconds=each)
        for name, machine, stage, each in took
    ]
    assert rebalanced(shared(a=0.5, b=0.5), PlanParts(tuple(parts), ())).shares == (0.25, 0.75)


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
    assert rebalanced(alone, PlanParts((), ())) is alone
    assert lightened(alone, Evaluation(0, 0, (load(A, 200),), ""), {A: 100}) is alone
