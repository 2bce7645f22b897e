"""Replicas that a search gives so few micro-batches that there are no turns for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tvm_split.planner.problem import Stage
from tvm_split.rpc_runtime.program.turns import LONGEST


def with_turns(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages without replicas whose share is less than the shortest turn."""
    found = []
    for stage in stages:
        kept = [each for each in zip(stage.machines, stage.shares, strict=True) if each[1] * LONGEST >= 1 - 1e-9]
        if len(kept) < len(stage.machines):
            machines, shares = zip(*kept, strict=True)
            stage = replace(stage, machines=machines, shares=tuple(share / math.fsum(shares) for share in shares))
        found.append(stage)
    return tuple(found)
