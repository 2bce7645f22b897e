"""Templates: schedules with named choices, which a cost rule picks without measuring, or tuning picks by measuring.

A new family of kernels needs two functions: one returns the choices that a function of the family leaves open, the
other schedules the function with given choices. This module and `schedules.tuning` provide the rest: the default
kernel, tuning and its database.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Generic, TypeVar

from tvm import s_tir, tirx

from schedules.blocks import new_schedule
from schedules.prefetch import prefetch_weights

CHOICES_ATTRIBUTE = "tvm_split.choices"
"""PrimFunc attribute, and annotation in a schedule's trace: the template's choices for this schedule, as text."""

FAILURE_ATTRIBUTE = "tvm_split.failure"
"""Annotation in a failed trial's trace: the reason, in one line."""

Value = int | str
Choices = Mapping[str, Value]
"""One value for each of a template's names, for example ``{"tile": "7x4", "unroll": 4}``."""


@dataclass(frozen=True)
class Space:
    """The choices that a template leaves open for one function.

    ``axes`` holds the values of each name, ordered so that neighbouring values are similar. ``default`` is the cost
    rule's pick and lies in the space. ``allows`` excludes combinations that are meaningless or cannot be scheduled.
    """

    axes: Mapping[str, tuple[Value, ...]]
    default: Choices
    allows: Callable[[Choices], bool] = field(default=lambda choices: True)

    def __post_init__(self) -> None:
        if not self.contains(self.default):
            raise ValueError(f"the default {text_of(self.default)!r} is not in its own space {dict(self.axes)}")

    @property
    def largest_size(self) -> int:
        """The number of combinations, including those that are not allowed."""
        return prod(len(values) for values in self.axes.values())

    def contains(self, choices: Choices) -> bool:
        return (
            choices.keys() == self.axes.keys()
            and all(choices[name] in values for name, values in self.axes.items())
            and self.allows(choices)
        )

    def all_choices(self) -> Iterator[Choices]:
        """Every allowed combination; the last axis changes fastest."""
        for values in itertools.product(*self.axes.values()):
            choices = dict(zip(self.axes, values, strict=True))
            if self.allows(choices):
                yield choices


Machine = TypeVar("Machine")
"""A template's description of the machine: `traits.Traits` for a CPU, `gpu.tile.Gpu` for a GPU."""


@dataclass(frozen=True)
class Template(Generic[Machine]):
    """A family of kernels whose schedule has choices.

    ``space`` returns the choices for a function, or None if the function is not of this family. ``schedule`` makes the
    schedule for choices from that space. It must record its instructions in a trace, because tuning stores the trace.
    """

    name: str
    space: Callable[[tirx.PrimFunc, Machine], Space | None]
    schedule: Callable[[tirx.PrimFunc, Machine, Choices], s_tir.Schedule]


def schedule_by(
    template: Template[Machine], function: tirx.PrimFunc, machine: Machine, choices: Choices
) -> s_tir.Schedule:
    """Schedule a function with a template, and record the choices as an annotation in the schedule's trace."""
    return _annotated(template.schedule(function, machine, choices), choices)


def say_failure(schedule: s_tir.Schedule, reason: str) -> None:
    """Record in a schedule's trace why its kernel could not be measured."""
    schedule.annotate(schedule.get_sblock("root"), FAILURE_ATTRIBUTE, reason)


def choices_only(function: tirx.PrimFunc, choices: Choices) -> s_tir.Schedule:
    """A schedule with only the annotation, to record choices that cannot be scheduled."""
    return _annotated(new_schedule(function), choices)


def _annotated(schedule: s_tir.Schedule, choices: Choices) -> s_tir.Schedule:
    schedule.annotate(schedule.get_sblock("root"), CHOICES_ATTRIBUTE, text_of(choices))
    return schedule


def scheduled_function(schedule: s_tir.Schedule) -> tirx.PrimFunc:
    """The scheduled function, with its choices as an attribute; the schedule is from `schedule_by` or a replayed trace.

    Prefetches are inserted here from the schedule's marks, because a trace cannot hold them.
    """
    choices = schedule.get(schedule.get_sblock("root")).annotations.get(CHOICES_ATTRIBUTE, None)
    if choices is None:
        return prefetch_weights(schedule.mod["main"])
    # Records take the annotation from the schedule's own trace, so it must stay there. TVM cannot copy every schedule.
    bare = new_schedule(schedule.mod["main"])
    bare.unannotate(bare.get_sblock("root"), CHOICES_ATTRIBUTE)
    return prefetch_weights(bare.mod["main"]).with_attr(CHOICES_ATTRIBUTE, str(choices))


def default_rule(template: Template[Machine]) -> Callable[[tirx.PrimFunc, Machine], tirx.PrimFunc | None]:
    """A rule that schedules a function with the cost rule's choices, or returns None for other families."""

    def rule(function: tirx.PrimFunc, traits: Machine) -> tirx.PrimFunc | None:
        space = template.space(function, traits)
        if space is None:
            return None
        return scheduled_function(schedule_by(template, function, traits, space.default))

    return rule


def text_of(choices: Choices) -> str:
    """Choices as readable text, such as ``tile=7x4 chunk=all``; equal choices give equal text."""
    return " ".join(f"{name}={choices[name]}" for name in sorted(choices))


def choices_from(text: str) -> Choices:
    """Parse the choices from a text that `text_of` wrote.

    Raises:
        ValueError: the text has another form.
    """
    choices: dict[str, Value] = {}
    for part in text.split():
        name, separator, value = part.partition("=")
        if not (name and separator and value):
            raise ValueError(f"{part!r} in {text!r} is not NAME=VALUE")
        choices[name] = int(value) if value.lstrip("-").isdigit() else value
    return choices
