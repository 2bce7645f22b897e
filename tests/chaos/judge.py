"""Says what was wrong with a scenario, and sums up many of them in a table. No verdict depends on a measured time but
that a client hangs."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.program.program import Program
from tests.chaos.director import Story
from tests.chaos.faults import CLIENT_KILLED, FAULTS
from tests.chaos.scenario import Scenario

FAULTY = ("lost", "doubled", "wrong", "hung", "left", "errors", "unsaid")
"""The columns that must be 0."""
BEGINNINGS = ("failure", "draining", "returned")
"""Kinds of events that say what happened, and not what came of it."""


@dataclass
class Verdict:
    """Counts of what was wrong, and why; ``false_alarms`` cost a pause only.

    ``errors`` should not have come, or name no machine that was hit; ``unsaid`` are faults without an event.
    """

    number: int
    scenario: str
    faults: str
    recovery: str
    right: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    hung: int = 0
    left: int = 0
    errors: int = 0
    unsaid: int = 0
    false_alarms: int = 0
    pause_seconds: float | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not any(getattr(self, name) for name in FAULTY)


def verdict_of(scenario: Scenario, story: Story) -> Verdict:
    verdict = Verdict(scenario.number, str(scenario), scenario.title, _recovery(story))
    for outcome in story.outcomes:
        for name in ("right", "wrong", "lost", "doubled"):
            count = getattr(outcome, name)
            if name == "lost" and outcome.error:
                continue  # those without a result got the error
            setattr(verdict, name, getattr(verdict, name) + count)
    if verdict.lost or verdict.doubled or verdict.wrong:
        verdict.reasons.append(f"results: {story.outcomes}")
    if story.hung:
        verdict.hung = 1
        verdict.reasons.append(f"the client hangs:\n{story.hung}")
    verdict.left = len(story.left)
    verdict.reasons += story.left
    wrong_errors = tuple(_wrong_errors(scenario, story))
    verdict.errors = len(wrong_errors)
    verdict.reasons += wrong_errors
    alarms = [event for at, event in story.events if event.kind == "failure" and not _was_hit(story, at, event)]
    verdict.false_alarms = len(alarms)
    verdict.reasons += [f"false alarm: {event.cause}" for event in alarms]
    if not verdict.hung and (silent := _without_event(scenario, story)):
        verdict.unsaid = 1
        verdict.reasons.append(f"no event of {silent}")
    pauses = [outcome.longest_pause for outcome in story.outcomes if not outcome.error]
    verdict.pause_seconds = max(pauses, default=None)
    return verdict


def _recovery(story: Story) -> str:
    if any(hit.fault == CLIENT_KILLED for hit in story.hits):
        return "client gone"
    if story.open_error:
        return "error while deploying"
    kinds = Counter(event.kind for _, event in story.events if event.kind not in BEGINNINGS)
    return ", ".join(f"{kind} {times} times" if times > 1 else kind for kind, times in kinds.items()) or "none needed"


def _errors(story: Story) -> list[str]:
    texts = [outcome.error for outcome in story.outcomes]
    return list(dict.fromkeys(filter(None, (story.open_error, *texts))))


def _wrong_errors(scenario: Scenario, story: Story) -> Iterator[str]:
    """Yield what is wrong with the errors of the callers."""
    errors = _errors(story)
    if len(errors) > 1:
        yield f"{len(errors)} different errors: {errors}"
    machines = {hit.machine for hit in story.hits if hit.machine}
    lost = {hit.machine for hit in story.hits if hit.machine and FAULTS[hit.fault].is_lost}
    for error in errors:
        if not any(repr(machine) in error for machine in machines):
            yield f"this error names no machine that was hit: {error}"
        elif not story.open_error and lost != set(scenario.machines):
            yield f"machines were left, and still: {error}"


def _was_hit(story: Story, at: float, event: DeploymentEvent) -> bool:
    """Return whether an event names a machine that was hit before it."""
    hit = {hit.machine for hit, when in story.hits.items() if hit.machine and when < at}
    return event.machine in hit or any(repr(machine) in event.cause for machine in hit)


def _without_event(scenario: Scenario, story: Story) -> str:
    """Return a fault that must have led to an event and has not; empty if there is none."""
    if story.open_error or any(not hit.machine for hit in story.hits):
        return ""
    needed = machines_needed(scenario.subject.program)
    for hit, at in story.hits.items():
        fault = FAULTS[hit.fault]
        is_missed = fault.loses and hit.machine in needed and at < story.closing_at
        # Shared memory goes on behind a frozen relay, and the end may come before the silence is noticed.
        if is_missed and not story.events and (scenario.by_grpc or not fault.has_relay):
            return str(hit)
    return ""


def machines_needed(program: Program) -> set[str]:
    """Return the machines without which there is no result."""
    tensors, machines = {tensor.name for tensor in program.outputs}, set()
    for replicas in reversed(program.replicas.values()):
        if not tensors.isdisjoint(tensor.name for tensor in replicas[0].outputs):
            machines |= {stage.machine for stage in replicas}
            tensors |= {tensor.name for tensor in replicas[0].inputs}
    return machines


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """Return the sums of all verdicts, by faults and recovery."""
    columns = ("lost", "doubled", "wrong", "hung", "left", "errors", "unsaid", "false_alarms")
    table = Table("fault", "recovery", "number", "results", *(name.replace("_", " ") for name in columns))
    for name in ("pause median, s", "p95", "maximum"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.faults, verdict.recovery].append(verdict)
    rows = [(*key, group) for key, group in sorted(groups.items())]
    for fault, recovery, group in (*rows, ("all", "", list(verdicts))):
        sums = [sum(getattr(verdict, name) for verdict in group) for name in ("right", *columns)]
        table.add_row(fault, recovery, str(len(group)), *map(str, sums), *_pauses(group))
    return table


def _pauses(group: Iterable[Verdict]) -> tuple[str, ...]:
    pauses = sorted(verdict.pause_seconds for verdict in group if verdict.pause_seconds is not None)
    if not pauses:
        return "", "", ""
    late = pauses[min(len(pauses) - 1, int(0.95 * len(pauses)))]
    return tuple(f"{value:.2f}" for value in (statistics.median(pauses), late, pauses[-1]))


def as_json(seed: int, verdicts: Sequence[Verdict], left_out: dict[str, str]) -> dict[str, Any]:
    return {"seed": seed, "left_out": left_out, "scenarios": [asdict(verdict) for verdict in verdicts]}
