"""The scheduler's one function: total, sound, and the order that its module draws."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rpc_runtime.execution.stage_order import Compute, StageState, Wait, next_action

READY, LACKS_INPUTS, LACKS_ROOM, AHEAD = StageState


@given(st.lists(st.sampled_from(StageState), max_size=8))
def test_it_computes_the_last_that_can(stages: list[StageState]) -> None:
    action = next_action(stages)
    if READY in stages:
        assert isinstance(action, Compute)
        assert stages[action.stage] is READY
        assert READY not in stages[action.stage + 1 :]
    else:
        assert action == Wait(for_inputs=LACKS_ROOM not in stages)


@pytest.mark.parametrize(
    ("stages", "for_inputs"),
    [([LACKS_INPUTS], True), ([AHEAD], True), ([AHEAD, LACKS_INPUTS], True), ([LACKS_INPUTS, LACKS_ROOM], False)],
)
def test_what_a_machine_waits_for(stages: list[StageState], for_inputs: bool) -> None:
    assert next_action(stages) == Wait(for_inputs)


def test_the_order_that_the_module_draws() -> None:
    finished, done_elsewhere, order = {"a": 0, "c": 0}, 0, []
    for _ in range(7):
        states = [
            READY if finished["a"] < 3 else LACKS_INPUTS,
            READY if finished["c"] < done_elsewhere else LACKS_INPUTS,
        ]
        elsewhere_can = done_elsewhere < finished["a"]
        action = next_action(states)
        if isinstance(action, Compute):
            name = "ac"[action.stage]
            order.append(f"{name}{finished[name]}")
            finished[name] += 1
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
            waiting = LACKS_ROOM if ahead >= room[i] else READY
            stages.append(waiting if finished[i] < arrived else LACKS_INPUTS)
        action = next_action(stages)
        assert isinstance(action, Compute)
        finished[action.stage] += 1
    assert finished == [batches] * length
