"""What a machine computes next: one total function from the state of its stages to an action.

A machine with several stages has one compute thread. Of the stages that could run, the last one in topological order
runs: it drains what is nearest to the output, so results leave early and queues stay short. With three micro-batches,
on a machine that holds the first and the last stage of three (the middle one elsewhere, equally slow)::

    step          1   2   3   4   5   6   7
    this machine  a0  a1  c0  c1  a2  .   c2
    elsewhere     .   b0  b1  .   .   b2  .
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class StageState(enum.Enum):
    """Where a stage stands as to its next micro-batch."""

    READY = enum.auto()
    LACKS_INPUTS = enum.auto()
    LACKS_ROOM = enum.auto()
    """Its inputs are there, but not a place for its outputs."""
    AHEAD = enum.auto()
    """It takes no inputs, and has computed as far as somebody takes its outputs."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the next micro-batch of the stage at position ``stage`` on the machine."""

    stage: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can run: ``for_inputs`` when every stage lacks inputs, else outputs must leave first."""

    for_inputs: bool


Action = Compute | Wait


def next_action(stages: Sequence[StageState]) -> Action:
    """The action for ``stages``, which are in topological order."""
    for position in range(len(stages) - 1, -1, -1):
        if stages[position] is StageState.READY:
            return Compute(position)
    return Wait(for_inputs=StageState.LACKS_ROOM not in stages)
