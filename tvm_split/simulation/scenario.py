"""What is simulated: a program as it would be deployed, what its machines and links take, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import PlanError
from tvm_split.units import short_list

NOT_COMPILED = BlobSpec("0" * 64, 0)
MOST_SCATTER = 10.0
"""Far above what real machines do. Of a log-normal duration that scatters much more, hardly one is near the mean."""
MOST_FACTOR = 1e6


@dataclass(frozen=True)
class StageTimes:
    """Seconds of computing one micro-batch: alone, and in a stream, where others compute and transfers take their part.

    ``transfer_seconds`` are the part of the latter that is no computing.
    """

    single_seconds: float
    stream_seconds: float
    transfer_seconds: float = 0.0


@dataclass(frozen=True)
class MachineTimes:
    """What the stages of a machine take, by their names, and how many cores it computes on."""

    stages: Mapping[str, StageTimes]
    cores: int = 1


@dataclass(frozen=True)
class LinkTimes:
    """What a link takes: ``wire_seconds`` by tensor, one after the other, and then its latency. Others take nothing.

    Where memory is shared, as many micro-batches as are planned are under way at most; over networks it may be more.
    """

    latency_seconds: float
    wire_seconds: Mapping[str, float]
    shares_memory: bool = False


@dataclass(frozen=True)
class Scenario:
    """A program with its times; ``links`` are by source and destination, those that are missing take no time.

    ``client_seconds`` is what sending and receiving a micro-batch of a stream takes of the client's cores.
    """

    program: Program
    machines: Mapping[str, MachineTimes]
    links: Mapping[tuple[str, str], LinkTimes]
    shared_cores: tuple[SharedCores, ...] = ()
    client_seconds: float = 0.0


@dataclass(frozen=True)
class Slowdown:
    """From a moment on, a machine takes ``factor`` times as long to compute."""

    machine: str
    factor: float
    since_seconds: float = 0.0


@dataclass(frozen=True)
class Loss:
    """A machine stands still from a moment on, and says nothing more."""

    machine: str
    at_seconds: float


@dataclass(frozen=True)
class WhatIf:
    """What is not as planned.

    ``compute_scatter`` and ``link_scatter`` are standard deviations, as shares of the mean, of log-normal durations;
    ``seed`` decides which.

    Raises:
        PlanError: a number that cannot be.
    """

    slowdowns: tuple[Slowdown, ...] = ()
    losses: tuple[Loss, ...] = ()
    compute_scatter: float = 0.0
    link_scatter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for each in self.slowdowns:
            if not 0 < each.factor <= MOST_FACTOR:
                raise PlanError(
                    f"machine {each.machine!r} is to compute {each.factor} times as long; give more than 0, and at "
                    f"most {MOST_FACTOR:g}, or lose it"
                )
        for what, names in (
            ("slowed", [each.machine for each in self.slowdowns]),
            ("lost", [each.machine for each in self.losses]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise PlanError(f"machine {twice!r} is to be {what} {names.count(twice)} times; give one")
        for value in (self.compute_scatter, self.link_scatter):
            if not 0 <= value <= MOST_SCATTER:
                raise PlanError(
                    f"a scatter of {value} was asked for; give a share of the mean, like 0.05, of at most "
                    f"{MOST_SCATTER:g}"
                )

    def require_known(self, scenario: Scenario) -> None:
        """A `PlanError` that names a machine which the scenario does not have: there is none, or it is idle."""
        for name in [*(each.machine for each in self.slowdowns), *(each.machine for each in self.losses)]:
            if name not in scenario.machines:
                used = short_list(list(scenario.machines))
                raise PlanError(f"the plan does not use a machine named {name!r}; it uses {used}")


AS_PLANNED = WhatIf()
NO_TIME = LinkTimes(0.0, {})


@dataclass
class ProgramBuilder:
    """Puts a program together of stages that are not compiled; tensors are known by name and size."""

    stages: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = field(default_factory=list)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    makers: dict[str, str | None] = field(default_factory=dict)
    takers: dict[str, list[str | None]] = field(default_factory=dict)

    def stage(self, name: str, machines: tuple[str, ...], turns: tuple[int, ...]) -> None:
        """In topological order."""
        self.stages.append((name, machines, turns))

    def tensor(self, name: str, size_bytes: float, maker: str | None, takers: list[str | None]) -> None:
        """What a stage makes for others; None is the client."""
        self.tensors[name] = TensorSpec(name, (max(round(size_bytes), 1),), "uint8")
        self.makers[name], self.takers[name] = maker, takers

    def program(self) -> Program:
        """The program. What takes nothing, or from which nothing is taken, gets that of the client, at no cost."""
        for name, *_ in self.stages:
            if not any(name in takers for takers in self.takers.values()):
                self.tensor(f"begin of {name}", 1, None, [name])
            if name not in self.makers.values():
                self.tensor(f"end of {name}", 1, name, [None])

        def made_by(stage: str | None) -> tuple[TensorSpec, ...]:
            return tuple(self.tensors[name] for name, maker in self.makers.items() if maker == stage)

        def taken_by(stage: str | None) -> tuple[TensorSpec, ...]:
            return tuple(self.tensors[name] for name, takers in self.takers.items() if stage in takers)

        ends = {name: (taken_by(name), made_by(name)) for name, *_ in self.stages}
        return Program(
            inputs=made_by(None),
            outputs=taken_by(None),
            stages=tuple(
                StageSpec(index, name, machine, (), "cpu", NOT_COMPILED, (), *ends[name], replica, turns)
                for index, (name, machines, turns) in enumerate(self.stages)
                for replica, machine in enumerate(machines)
            ),
        )
