"""The input of a simulation: a program as deployed, the times of its machines and links, and deviations from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.errors import PlanError
from tvm_split.units import short_list

NOT_COMPILED = BlobSpec("0" * 64, 0)
"""Stands for the library of a stage in a simulated program."""
MOST_SCATTER = 10.0
"""Largest scatter, far above that of real machines; with more, hardly any log-normal duration is near the mean."""
MOST_FACTOR = 1e6


@dataclass(frozen=True)
class StageTimes:
    """Seconds to compute one micro-batch: alone, and in a stream, with contention and the cost of transfers.

    ``transfer_seconds`` is the part of ``stream_seconds`` that transfers take.
    """

    single_seconds: float
    stream_seconds: float
    transfer_seconds: float = 0.0


@dataclass(frozen=True)
class MachineTimes:
    """The times of a machine's stages, by their names, and the number of cores that it computes on."""

    stages: Mapping[str, StageTimes]
    cores: int = 1


@dataclass(frozen=True)
class LinkTimes:
    """The times of a link: ``wire_seconds`` by tensor, sent one at a time, then the latency. Other tensors take 0.

    With shared memory, at most the planned number of micro-batches is in flight; over networks it may grow.
    """

    latency_seconds: float
    wire_seconds: Mapping[str, float]
    shares_memory: bool = False


@dataclass(frozen=True)
class Scenario:
    """A program with its times; ``links`` are by source and destination, and missing links take no time.

    ``client_seconds`` is the time of the client's cores to send and receive one micro-batch of a stream.
    """

    program: Program
    machines: Mapping[str, MachineTimes]
    links: Mapping[tuple[str, str], LinkTimes]
    shared_cores: tuple[SharedCores, ...] = ()
    client_seconds: float = 0.0


@dataclass(frozen=True)
class Slowdown:
    """From ``since_seconds`` on, a machine takes ``factor`` times as long to compute."""

    machine: str
    factor: float
    since_seconds: float = 0.0


@dataclass(frozen=True)
class Loss:
    """From ``at_seconds`` on, a machine neither computes nor communicates."""

    machine: str
    at_seconds: float


@dataclass(frozen=True)
class WhatIf:
    """Deviations from the plan.

    ``compute_scatter`` and ``link_scatter`` are standard deviations of log-normal durations, as shares of the mean;
    ``seed`` is that of the random generator.

    Raises:
        PlanError: a number is out of range, or a machine has two slowdowns or losses.
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
        """Raise a `PlanError` if a named machine is not in the scenario: it does not exist, or it is idle."""
        for name in [*(each.machine for each in self.slowdowns), *(each.machine for each in self.losses)]:
            if name not in scenario.machines:
                used = short_list(list(scenario.machines))
                raise PlanError(f"the plan does not use a machine named {name!r}; it uses {used}")


AS_PLANNED = WhatIf()
NO_TIME = LinkTimes(0.0, {})


@dataclass
class ProgramBuilder:
    """Builds a program of stages that are not compiled; tensors have only a name and a size."""

    stages: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = field(default_factory=list)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    makers: dict[str, str | None] = field(default_factory=dict)
    takers: dict[str, list[str | None]] = field(default_factory=dict)

    def stage(self, name: str, machines: tuple[str, ...], turns: tuple[int, ...]) -> None:
        """Add a stage; stages are added in topological order."""
        self.stages.append((name, machines, turns))

    def tensor(self, name: str, size_bytes: float, maker: str | None, takers: list[str | None]) -> None:
        """Add a tensor that one stage produces and others consume; None is the client."""
        self.tensors[name] = TensorSpec(name, (max(round(size_bytes), 1),), "uint8")
        self.makers[name], self.takers[name] = maker, takers

    def program(self) -> Program:
        """The program. A stage without inputs or outputs is connected to the client by a tensor of 1 byte."""
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
