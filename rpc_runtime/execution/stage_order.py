"""What a machine computes next: one total function from the state of its queues to an action.

A machine with several stages has one compute thread. Of the stages that could run, the last one in topological order
runs: it drains what is nearest to the output, so results leave early and queues stay short. With three micro-batches,
on a machine that holds the first and the last stage of three (the middle one elsewhere, equally slow)::

    step          1   2   3   4   5   6   7
    this machine  a0  a1  c0  c1  a2  .   c2
    elsewhere     .   b0  b1  .   .   b2  .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNBOUNDED = 1 << 62
"""Stands for "as many as you like" in the counts below."""


@dataclass(frozen=True, slots=True)
class StageState:
    """Where a stage stands.

    ``finished`` counts the micro-batches it has computed, ``arrived`` those whose inputs are all there (consumed ones
    included), ``room`` says for how many more its outputs have a place. A stage without inputs has ``arrived``
    UNBOUNDED, one whose outputs nobody takes has ``room`` UNBOUNDED. A replica counts only the micro-batches of its own
    turns.
    """

    finished: int
    arrived: int
    room: int

    def __post_init__(self) -> None:
        if not 0 <= self.finished <= self.arrived or self.room < 0:
            raise ValueError(f"no stage can be in the state {self}")


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the micro-batch with ``number`` own ones before it, of the stage at position ``stage`` on the machine."""

    stage: int
    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can run: ``for_inputs`` when every stage lacks inputs, else outputs must leave first."""

    for_inputs: bool


Action = Compute | Wait


def next_action(stages: Sequence[StageState]) -> Action:
    """The action for ``stages``, which are in topological order."""
    for position in range(len(stages) - 1, -1, -1):
        stage = stages[position]
        endless = stage.arrived >= UNBOUNDED and stage.room >= UNBOUNDED
        if stage.finished < stage.arrived and stage.room > 0 and not endless:
            return Compute(position, stage.finished)
    starved = all(stage.finished >= stage.arrived or stage.arrived >= UNBOUNDED for stage in stages)
    return Wait(for_inputs=starved)
