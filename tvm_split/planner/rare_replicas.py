"""Replicas that a search gives so few micro-batches that there are no turns for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm_split.planner.problem import Stage
from tvm_split.rpc_runtime.program.turns import longest_turns


def with_turns(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages without replicas whose share is less than the shortest turn, the rarest left out first."""
    return tuple(_with_turns(stage) for stage in stages)


def _with_turns(stage: Stage) -> Stage:
    kept = sorted(range(len(stage.machines)), key=lambda place: -stage.shares[place])
    whole = math.fsum(stage.shares)
    while stage.shares[kept[-1]] / whole * longest_turns(len(kept)) < 1 - 1e-9:
        kept.pop()
        whole = math.fsum(stage.shares[place] for place in kept)
    if len(kept) == len(stage.machines):
        return stage
    kept.sort()
    return replace(
        stage,
        machines=tuple(stage.machines[place] for place in kept),
        shares=tuple(stage.shares[place] / whole for place in kept),
    )
