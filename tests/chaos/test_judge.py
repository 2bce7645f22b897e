"""The judge of chaos runs sees each kind of wrong result, error and event, or a quiet table would say nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.program.program import Program
from tests.chaos.director import Story
from tests.chaos.judge import FAULTY, machines_needed, verdict_of
from tests.chaos.scenario import Hit, Scenario
from tests.chaos.subjects import Subject
from tests.chaos.task import Outcome, Task
from tests.helpers.rpc_runtime.specs import stage, tensor

A, B = "machine-a", "machine-b"
PROGRAM = Program((tensor("x"),), (tensor("y"),), (stage(0, "s", A, "x", "t"), stage(1, "r", B, "t", "y")))
EXPECTED = [(np.full(2, number, np.float32),) for number in range(5)]
HIT = Hit("killed", B, "steady", 0.0)
SCENARIO = Scenario(0, Subject("", PROGRAM, Path(), [], EXPECTED), (A, B), True, 1, 0, (HIT,))
TASK = Task(PROGRAM, {}, {}, Path(), [], EXPECTED, 1, 0, False, 1.0)
FAILURE, RECOVERED = (DeploymentEvent(kind, 1, B, f"machine {B!r} has gone") for kind in ("failure", "recovered"))


def story(**changes: Any) -> Story:
    """Return how machine B is killed, and all is well."""
    right = Outcome(fed=5, right=5)
    return replace(Story({HIT: 1.0}, [(2.0, FAILURE), (3.0, RECOVERED)], outcomes=[right], closing_at=4.0), **changes)


@pytest.mark.parametrize(
    ("results", "counts"),
    [
        ((0, 1, 2, 3, 4, 0), {"right": 6}),
        ((0, 1, 1, 3), {"right": 3, "doubled": 1}),
        ((0, 1, 3, 3), {"right": 3, "lost": 1}),
        ((0, 3), {"right": 1, "wrong": 1}),
    ],
)
def test_each_result_is_compared_with_its_own_and_its_neighbours(results: tuple[int, ...], counts: dict) -> None:
    outcome = Outcome()
    for number, result in enumerate(results):
        outcome.take(TASK, number, EXPECTED[result])
    assert {name: getattr(outcome, name) for name in ("right", "doubled", "lost", "wrong")} == {
        **dict.fromkeys(("right", "doubled", "lost", "wrong"), 0),
        **counts,
    }


def test_results_that_differ_in_a_sign_of_zero_are_wrong() -> None:
    outcome = Outcome()
    outcome.take(TASK, 0, (np.full(2, -0.0, np.float32),))
    assert outcome.wrong == 1


@pytest.mark.parametrize(
    ("changes", "faulty"),
    [
        ({}, ""),
        ({"events": [(0.5, FAILURE)]}, ""),  # a false alarm is counted, and costs a pause only
        ({"outcomes": [Outcome(fed=5, right=4, doubled=1)]}, "doubled"),
        ({"outcomes": [Outcome(fed=5, right=4, lost=1)]}, "lost"),
        ({"outcomes": [Outcome(fed=5, right=4, wrong=1)]}, "wrong"),
        ({"outcomes": [Outcome(fed=5, right=4, error=f"{B!r} has gone")]}, "errors"),
        ({"open_error": "it has gone"}, "errors"),
        ({"open_error": f"{B!r} has gone"}, ""),
        ({"open_error": f"{B!r} has gone", "outcomes": [Outcome(error=f"{B!r} went")]}, "errors"),
        ({"hung": "a stack"}, "hung"),
        ({"left": ["a thread"]}, "left"),
        ({"events": []}, "unsaid"),
        ({"events": [], "closing_at": 0.5}, ""),
    ],
)
def test_what_is_wrong_is_in_its_column(changes: dict[str, Any], faulty: str) -> None:
    verdict = verdict_of(SCENARIO, story(**changes))
    assert [name for name in FAULTY if getattr(verdict, name)] == [faulty] * bool(faulty)
    assert verdict.false_alarms == (changes.get("events") == [(0.5, FAILURE)])


def test_an_error_is_right_when_no_machine_is_left() -> None:
    hits = {HIT: 1.0, Hit("killed", A, "steady", 0.0): 1.0}
    ended = [Outcome(fed=5, right=3, error=f"{B!r} has gone")]
    assert verdict_of(SCENARIO, story(hits=hits, outcomes=ended)).is_right


def test_a_machine_is_needed_if_an_output_depends_on_it() -> None:
    unused = stage(2, "unused", "C", "y", "u")
    assert machines_needed(replace(PROGRAM, stages=(*PROGRAM.stages, unused))) == {A, B}
