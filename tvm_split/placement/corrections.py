"""Plan again from measurements of a running plan, and change the plan only if the gain is worth it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm_split.placement.problem import Problem, Timed, objective_seconds
from tvm_split.placement.profile import ClusterProfile, Corrections, MachineProfile, PieceTime

DEFAULT_THRESHOLD = 0.05
"""Share of the current plan's value that a new plan must save."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a running plan, by machine and by link.

    ``compute_ratios`` are measured / predicted compute times. ``link_speeds`` are in bytes per second, for links that
    have changed. ``earlier`` are the corrections that the plan's prediction includes; ``profiled_at`` is that of the
    prediction, None if it is not known.
    """

    compute_ratios: Mapping[str, float] = field(default_factory=dict)
    link_speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    earlier: Corrections = field(default_factory=Corrections)
    profiled_at: float | None = None


@dataclass(frozen=True)
class Change:
    """Whether to change a plan; ``gain`` is the relative saving, 1 - best / current value of the objective."""

    changed: bool
    gain: float


def corrections_of(measured: Measured) -> Corrections:
    """Return the corrections of the profile: the earlier ones, updated by the new measurements.

    Without the earlier ones, a machine that lost its layers because it is slow would seem fast again as soon as it is
    idle, and the planner would alternate between two plans.
    """
    ratios = dict(measured.earlier.compute_ratios)
    for machine, ratio in measured.compute_ratios.items():
        ratios[machine] = ratios.get(machine, 1.0) * ratio
    speeds = {(source, end): speed for source, end, speed in measured.earlier.link_speeds}
    speeds |= measured.link_speeds
    return Corrections(tuple(ratios.items()), tuple((*link, speed) for link, speed in speeds.items()))


def calibrated(profile: ClusterProfile, corrections: Corrections) -> ClusterProfile:
    """The profile with the times of machines and the speeds of links corrected by measurements.

    A plan measures only the pieces that it placed on a machine; the times of the others are scaled by the same factor.
    This holds for the usual causes of a difference: another program on the machine, a lower clock, fewer cores.
    """
    ratios = dict(corrections.compute_ratios)
    speeds = {(source, end): speed for source, end, speed in corrections.link_speeds}
    return dataclasses.replace(
        profile,
        machines=tuple(_scaled(machine, ratios.get(machine.machine, 1.0)) for machine in profile.machines),
        links=tuple(
            dataclasses.replace(
                link, bytes_per_second=speeds.get((link.source, link.destination), link.bytes_per_second)
            )
            for link in profile.links
        ),
        corrections=corrections,
    )


def change_to(best: Timed, now: Timed, problem: Problem, threshold: float, *, keeps_demands: bool) -> Change:
    """Return whether to replace the current plan, with the values ``now``, by the ``best`` plan.

    The current plan is replaced if the gain exceeds ``threshold``, or if it breaks a demand (``keeps_demands`` is
    false). A ``threshold`` above the noise of measurements prevents alternating between two plans of about equal value.
    """
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
