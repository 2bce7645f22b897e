"""What is asked of the planner: one request, whoever asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tvm_split.errors import PlanError
from tvm_split.planner.problem import Objective, Precision
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.search import DEFAULT_TIME_LIMIT_SECONDS
from tvm_split.planner.shard import Shard

Split = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class PlanRequest:
    """How a model is to be planned. Layers are given by name or prefix, as in a split.

    Attributes:
        objective: ``"throughput"`` (least time between results) or ``"latency"`` (least time for one input).
        stages: exactly so many stages. More than there are machines go round.
        split: layers by machine, decided by the user; see `tvm_split.planner.by_hand`.
        shards: layers that machines compute together, decided by the user; with ``split``, that is for the others.
        consider_shards: whether a plan for latency may have layers that machines compute together; also where no other
            plan fits the machines' memory.
        predict: a split, or shards, by hand are predicted, too: measured for it, or estimated if ``measure`` is False.
        pins: pairs of layers and the machine on which they must stay.
        kept_off: pairs of layers and a machine on which they must not be.
        replicas: a stage may be dealt out over several machines, each of which then holds its weights.
        maximum_machines: use so many at most.
        maximum_period_seconds, maximum_latency_seconds: what the plan must keep to besides its objective.
        profile: measurements to plan with, instead of making them; by hand, what to predict by.
        measure: False plans with estimates from operations and bytes; nothing is contacted but for targets.
        refresh: measure anew what was measured before.
        database: tuned kernels to measure, as `tvm_split.compile` takes them.
        allow_lossy: on links with ``codec: auto``, codecs may be chosen that together change an output by so much, as a
            share of its largest magnitude (0.01, say), on the example inputs; 0 chooses only such that lose nothing.
        precision: of the operands of convolutions and products, which add in float32: half precision rounds them.
        strategy: by which a plan is searched for: ``"best"``, ``"first-fit"``, or one that a package adds.
        time_limit_seconds: for the search; then the best plan so far is returned, with its bound.

    Raises:
        PlanError: an objective or number of stages that there cannot be, or a split with other demands.
    """

    objective: Objective = "throughput"
    stages: int | None = None
    split: Split | None = None
    shards: tuple[Shard, ...] = ()
    consider_shards: bool = True
    predict: bool = False
    pins: tuple[tuple[str, str], ...] = ()
    kept_off: tuple[tuple[str, str], ...] = ()
    replicas: bool = False
    maximum_machines: int | None = None
    maximum_period_seconds: float = math.inf
    maximum_latency_seconds: float = math.inf
    profile: ClusterProfile | None = None
    measure: bool = True
    refresh: bool = False
    database: str | Path | None = None
    allow_lossy: float = 0.0
    precision: Precision = "float32"
    strategy: str = "best"
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise PlanError(f"objective is {self.objective!r}; it can be {' or '.join(map(repr, get_args(Objective)))}")
        if self.precision not in get_args(Precision):
            raise PlanError(f"precision is {self.precision!r}; it can be {', '.join(get_args(Precision))}")
        if self.precision != "float32" and self.shards:
            raise PlanError("layers that machines compute together stay in float32; leave out the shards, or precision")
        if self.stages is not None and self.stages < 1:
            raise PlanError(f"stages={self.stages} was asked for; give at least 1")
        if not self.allow_lossy >= 0:
            raise PlanError(f"allow_lossy is {self.allow_lossy}; give the share of outputs that may be lost, like 0.01")
        if (self.split is not None or self.shards) and self.is_demanding:
            raise PlanError(
                "a split by hand leaves nothing to search; leave out the split and shards, or pins, replicas and limits"
            )

    @property
    def is_demanding(self) -> bool:
        """Whether it has demands, besides a number of stages, that only a search can keep to."""
        limits = (self.maximum_period_seconds, self.maximum_latency_seconds)
        counted = self.replicas or self.maximum_machines is not None
        return bool(self.pins or self.kept_off or counted or min(limits) < math.inf)
