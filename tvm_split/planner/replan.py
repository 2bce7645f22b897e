"""Plan anew from what a running plan was measured to do, and change it only where that is worth it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm_split.planner.evaluate import evaluate, keeps_demands
from tvm_split.planner.problem import Evaluation, Problem, Solution, Stage, Timed, objective_seconds
from tvm_split.planner.profile import ClusterProfile, Corrections, MachineProfile, PieceTime
from tvm_split.planner.step_graph import lower

DEFAULT_THRESHOLD = 0.05


@dataclass(frozen=True)
class Measured:
    """What a plan did: measured by predicted computing per machine, and bytes a second of links that have changed.

    ``earlier`` are the corrections that its prediction was made with, ``profiled_at`` is the prediction's; None where
    it is not known.
    """

    compute_ratios: Mapping[str, float] = field(default_factory=dict)
    link_speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    earlier: Corrections = field(default_factory=Corrections)
    profiled_at: float | None = None


@dataclass(frozen=True)
class Change:
    """Whether a plan is changed; ``gain`` is the share of its value that the best one would save."""

    changed: bool
    gain: float


@dataclass(frozen=True)
class Replanned:
    """The stages to run from now on."""

    change: Change
    stages: tuple[Stage, ...]
    evaluation: Evaluation
    best: Solution


def corrections_of(measured: Measured) -> Corrections:
    """What is known of the profile now: what was measured, and of idle machines and links what was known before.

    Without the latter, a machine that lost its layers because it is slow would seem fast again as soon as it is idle,
    and two plans would take turns.
    """
    ratios = dict(measured.earlier.compute_ratios)
    for machine, ratio in measured.compute_ratios.items():
        ratios[machine] = ratios.get(machine, 1.0) * ratio
    speeds = {(source, end): speed for source, end, speed in measured.earlier.link_speeds}
    speeds |= measured.link_speeds
    return Corrections(tuple(ratios.items()), tuple((*link, speed) for link, speed in speeds.items()))


def calibrated(profile: ClusterProfile, corrections: Corrections) -> ClusterProfile:
    """The profile with every machine's times scaled to what was measured there, and the links that were busy.

    A plan measures only the pieces that it put on a machine; the others are taken to be off by the same factor, which
    is so for what usually parts the two: another program on the machine, a lower clock, fewer cores.
    """
    ratios = dict(corrections.compute_ratios)
    speeds = {(source, end): speed for source, end, speed in corrections.link_speeds}
    return dataclasses.replace(
        profile,
        machines=tuple(_scaled(each, ratios.get(each.machine, 1.0)) for each in profile.machines),
        links=tuple(
            dataclasses.replace(
                each, bytes_per_second=speeds.get((each.source, each.destination), each.bytes_per_second)
            )
            for each in profile.links
        ),
        corrections=corrections,
    )


def replan(
    problem: Problem,
    current: Sequence[Stage],
    solve: Callable[[Problem], Solution],
    threshold: float = DEFAULT_THRESHOLD,
) -> Replanned:
    """The best plan of a calibrated problem, if it saves more than ``threshold`` of the current one's value.

    A threshold above the noise of measuring keeps two plans of about equal value from taking turns. A plan that does
    not keep to the problem's pins, numbers and limits is changed whatever that gains.

    Raises:
        PlanError: the current stages do not fit the problem.
    """
    now = evaluate(problem, lower(problem, current))
    best = solve(problem)
    change = change_to(best.evaluation, now, problem, threshold, keeps_demands=keeps_demands(problem, current, now))
    if change.changed:
        return Replanned(change, best.stages, best.evaluation, best)
    return Replanned(change, tuple(current), now, best)


def change_to(best: Timed, now: Timed, problem: Problem, threshold: float, *, keeps_demands: bool) -> Change:
    """Whether a plan that does ``now``, and may break a demand, is changed to the best one."""
    gain = 1.0 - objective_seconds(problem.objective, best) / objective_seconds(problem.objective, now)
    changed = gain > threshold or not keeps_demands
    return Change(changed, gain if changed else max(0.0, gain))


def _scaled(machine: MachineProfile, ratio: float) -> MachineProfile:
    return dataclasses.replace(
        machine,
        pieces={
            name: PieceTime(time.seconds * ratio, time.contended_seconds * ratio, time.origin)
            for name, time in machine.pieces.items()
        },
    )
