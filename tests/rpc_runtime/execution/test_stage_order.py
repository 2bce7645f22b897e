"""The scheduler's one function: total, sound, and the order that its module draws."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tvm_split.rpc_runtime.execution.stage_order import UNBOUNDED, Compute, StageState, Wait, next_action

states = st.builds(
    lambda finished, more, room: StageState(finished, finished + more, room),
    st.integers(0, 10**6),
    st.integers(0, 5),
    st.integers(0, 5),
)


@given(st.lists(states, max_size=8))
def test_it_computes_only_what_is_there_and_fits(stages: list[StageState]) -> None:
    action = next_action(stages)
    able = [i for i, s in enumerate(stages) if s.arrived > s.finished and s.room > 0]
    if able:
        assert action == Compute(able[-1], stages[able[-1]].finished)
    else:
        assert isinstance(action, Wait)
        assert action.for_inputs == all(s.arrived == s.finished for s in stages)


def test_a_stage_without_inputs_runs_only_as_far_as_somebody_takes_its_outputs() -> None:
    assert next_action([StageState(3, UNBOUNDED, 1)]) == Compute(0, 3)
    assert next_action([StageState(3, UNBOUNDED, 0)]) == Wait(for_inputs=True)
    assert next_action([StageState(0, UNBOUNDED, UNBOUNDED)]) == Wait(for_inputs=True)


def test_impossible_states_are_refused() -> None:
    with pytest.raises(ValueError, match="no stage can be"):
        StageState(2, 1, 1)


def test_the_order_that_the_module_draws() -> None:
    finished, done_elsewhere, order = {"a": 0, "c": 0}, 0, []
    for _ in range(7):
        states = [StageState(finished["a"], 3, 5), StageState(finished["c"], done_elsewhere, 5)]
        elsewhere_can = done_elsewhere < finished["a"]
        action = next_action(states)
        if isinstance(action, Compute):
            name = "ac"[action.stage]
            finished[name] += 1
            order.append(f"{name}{action.number}")
        else:
            order.append(".")
        done_elsewhere += elsewhere_can
    assert order == ["a0", "a1", "c0", "c1", "a2", ".", "c2"]


@given(st.data())
def test_a_chain_on_one_machine_never_sticks_and_stays_bounded(data: st.DataObject) -> None:
    length, batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    room = data.draw(st.lists(st.integers(1, 3), min_size=length, max_size=length))
    finished = [0] * length
    for _ in range(length * batches):
        stages = []
        for i in range(length):
            arrived = batches if i == 0 else finished[i - 1]
            ahead = finished[i] - finished[i + 1] if i + 1 < length else 0
            stages.append(StageState(finished[i], arrived, room[i] - ahead))
        action = next_action(stages)
        assert isinstance(action, Compute)
        finished[action.stage] += 1
    assert finished == [batches] * length
