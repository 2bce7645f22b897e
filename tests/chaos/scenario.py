"""A seed makes a scenario: what runs where, and which faults hit which machines when."""

import random
from collections.abc import Collection
from dataclasses import dataclass

from tests.chaos.faults import CLIENT_KILLED, FAULTS, PHASES, Phase
from tests.chaos.subjects import Subject, Subjects
from tests.chaos.task import MACHINES

EARLY = tuple(name for name in PHASES if PHASES[name].message in ("opening", "opened", "result"))
"""The phases that come without a fault."""


@dataclass(frozen=True)
class Hit:
    """A fault that hits a machine in a phase; with ``machine`` empty, the client."""

    fault: str
    machine: str
    phase: str
    delay_seconds: float
    lasts_seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.fault}{f' ({self.machine})' if self.machine else ''} while {self.phase}"

    @property
    def when(self) -> Phase:
        return PHASES[self.phase]


@dataclass(frozen=True)
class Scenario:
    """A subject on machines with faults; ``by_grpc``: no link uses shared memory.

    ``holds``: each machine holds the stages of the others. The client runs on for ``lingers_seconds`` after the last
    fault, in which a machine may return.
    """

    number: int
    subject: Subject
    machines: tuple[str, ...]
    by_grpc: bool
    streams: int
    callers: int
    hits: tuple[Hit, ...]
    lingers_seconds: float = 0.0
    holds: bool = False

    @property
    def title(self) -> str:
        return " and ".join(sorted(hit.fault for hit in self.hits)) or "nothing"

    @property
    def at_switch(self) -> bool:
        return any(hit.machine and FAULTS[hit.fault].at_switch for hit in self.hits)

    @property
    def relayed(self) -> list[str]:
        return sorted({hit.machine for hit in self.hits if hit.machine and FAULTS[hit.fault].has_relay})

    def __str__(self) -> str:
        way = "gRPC" if self.by_grpc else "any transport"
        callers = f"{self.streams} streams, {self.callers} threads of calls"
        hits = "; ".join(map(str, self.hits))
        return f"{self.number}: {self.subject.name} on {len(self.machines)} machines by {way}, {callers}: {hits}"


def scenario_of(seed: int, number: int, subjects: Subjects, faults: Collection[str]) -> Scenario:
    """Return a scenario, always the same for a seed and a number on machines that can do the same faults."""
    source = random.Random(f"{seed} {number}")
    machines = MACHINES[: source.choice((2, 3, 3, 4))]
    subject = subjects.chosen(source, len(machines))
    streams, callers = source.choice(((1, 0), (2, 0), (0, 4), (1, 2)))
    by_grpc = source.random() < 0.5
    hits = _hits(source, machines, sorted(faults))
    lingers_seconds = source.choice((0.0, 0.0, 1.5))
    return Scenario(number, subject, machines, by_grpc, streams, callers, hits, lingers_seconds, source.random() < 0.25)


def _hits(source: random.Random, machines: tuple[str, ...], faults: list[str]) -> tuple[Hit, ...]:
    first = _hit(source, machines, source.choice(faults), source.choice((*EARLY, "steady", "steady", "closing")))
    chance = source.random()
    if chance < 0.04:
        return (Hit(CLIENT_KILLED, "", first.phase, first.delay_seconds),)
    if chance < 0.08:
        return (first, Hit(CLIENT_KILLED, "", first.phase, first.delay_seconds))
    rest = tuple(machine for machine in machines if machine != first.machine)
    fault = source.choice([name for name in faults if _fit(name, first.fault)])
    if chance < 0.28:  # two at once
        second = _hit(source, rest, fault, first.phase)
        return (first, Hit(fault, second.machine, first.phase, first.delay_seconds, second.lasts_seconds))
    if chance < 0.5:  # one after the other
        return (first, _hit(source, rest, fault, source.choice(tuple(PHASES))))
    return (first,)


def _fit(one: str, other: str) -> bool:
    """Return whether two faults can be in one scenario: a relay cannot be reached from behind a switch."""
    first, second = FAULTS[one], FAULTS[other]
    return not ((first.at_switch and second.has_relay) or (second.at_switch and first.has_relay))


def _hit(source: random.Random, machines: tuple[str, ...], fault: str, phase: str) -> Hit:
    seconds = FAULTS[fault].seconds
    lasts = None if seconds is None else source.uniform(*seconds)
    return Hit(fault, source.choice(machines), phase, source.random() * PHASES[phase].spread_seconds, lasts)
