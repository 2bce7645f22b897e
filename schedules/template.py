"""A template: a schedule with named choices. A cost rule picks them without measuring, tuning picks them by measuring.

A new family of kernels becomes a template with two functions: one that says which choices a function of the family
leaves open, one that schedules the function by given choices. Everything else (the default kernel, tuning, its
database) comes from here and from `schedules.tuning`.
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
"""PrimFunc attribute, and annotation in a schedule's trace: the choices a template was scheduled by, as text."""

FAILURE_ATTRIBUTE = "tvm_split.failure"
"""Annotation in the trace of a failed trial: the reason, in one line."""

Value = int | str
Choices = Mapping[str, Value]
"""One value for each of a template's names, for example ``{"tile": "7x4", "unroll": 4}``."""


@dataclass(frozen=True)
class Space:
    """The choices that a template leaves open for one function.

    ``axes`` are the values that each name may take, in a sensible order (neighbours are alike); ``default`` is what the
    cost rule picks, and lies in the space. ``allows`` excludes combinations that mean nothing or cannot be scheduled.
    """

    axes: Mapping[str, tuple[Value, ...]]
    default: Choices
    allows: Callable[[Choices], bool] = field(default=lambda choices: True)

    def __post_init__(self) -> None:
        if not self.contains(self.default):
            raise ValueError(f"the default {text_of(self.default)!r} is not in its own space {dict(self.axes)}")

    @property
    def largest_size(self) -> int:
        """The number of combinations, counting those that are not allowed."""
        return prod(len(values) for values in self.axes.values())

    def contains(self, choices: Choices) -> bool:
        return (
            choices.keys() == self.axes.keys()
            and all(choices[name] in values for name, values in self.axes.items())
            and self.allows(choices)
        )

    def all_choices(self) -> Iterator[Choices]:
        """Every allowed combination, the last axis changing fastest."""
        for values in itertools.product(*self.axes.values()):
            choices = dict(zip(self.axes, values, strict=True))
            if self.allows(choices):
                yield choices


Machine = TypeVar("Machine")
"""What a template knows of the machine: `traits.Traits` of a CPU, `gpu.tile.Gpu`."""


@dataclass(frozen=True)
class Template(Generic[Machine]):
    """A family of kernels whose schedule has choices.

    ``space`` returns what is open for a function, or None where the function is not of this family. ``schedule`` makes
    the schedule for choices of that space; its instructions must be recorded in a trace, which is what tuning keeps.
    """

    name: str
    space: Callable[[tirx.PrimFunc, Machine], Space | None]
    schedule: Callable[[tirx.PrimFunc, Machine, Choices], s_tir.Schedule]


def schedule_by(
    template: Template[Machine], function: tirx.PrimFunc, machine: Machine, choices: Choices
) -> s_tir.Schedule:
    """The template's schedule of a function, with the choices as an annotation in its trace."""
    return _annotated(template.schedule(function, machine, choices), choices)


def say_failure(schedule: s_tir.Schedule, reason: str) -> None:
    """Keep in a schedule's trace why its kernel could not be measured."""
    schedule.annotate(schedule.get_sblock("root"), FAILURE_ATTRIBUTE, reason)


def choices_only(function: tirx.PrimFunc, choices: Choices) -> s_tir.Schedule:
    """Nothing but the annotation: how choices that cannot be scheduled are remembered."""
    return _annotated(new_schedule(function), choices)


def _annotated(schedule: s_tir.Schedule, choices: Choices) -> s_tir.Schedule:
    schedule.annotate(schedule.get_sblock("root"), CHOICES_ATTRIBUTE, text_of(choices))
    return schedule


def scheduled_function(schedule: s_tir.Schedule) -> tirx.PrimFunc:
    """The function of a schedule that `schedule_by` made, or that was replayed, with its choices as an attribute.

    Prefetches are made from the schedule's marks here, since a trace cannot hold them.
    """
    choices = schedule.get(schedule.get_sblock("root")).annotations.get(CHOICES_ATTRIBUTE, None)
    if choices is None:
        return prefetch_weights(schedule.mod["main"])
    # The annotation stays in the schedule's own trace, where records take it from. TVM cannot copy every schedule.
    bare = new_schedule(schedule.mod["main"])
    bare.unannotate(bare.get_sblock("root"), CHOICES_ATTRIBUTE)
    return prefetch_weights(bare.mod["main"]).with_attr(CHOICES_ATTRIBUTE, str(choices))


def default_rule(template: Template[Machine]) -> Callable[[tirx.PrimFunc, Machine], tirx.PrimFunc | None]:
    """The template as a rule that measures nothing: the function by the cost rule's choices, None if of no family."""

    def rule(function: tirx.PrimFunc, traits: Machine) -> tirx.PrimFunc | None:
        space = template.space(function, traits)
        if space is None:
            return None
        return scheduled_function(schedule_by(template, function, traits, space.default))

    return rule


def text_of(choices: Choices) -> str:
    """Choices as people read them, ``tile=7x4 chunk=all``; the same choices give the same text."""
    return " ".join(f"{name}={choices[name]}" for name in sorted(choices))


def choices_from(text: str) -> Choices:
    """The choices that a text of `text_of` stands for.

    Raises:
        ValueError: the text is none.
    """
    choices: dict[str, Value] = {}
    for part in text.split():
        name, separator, value = part.partition("=")
        if not (name and separator and value):
            raise ValueError(f"{part!r} in {text!r} is not NAME=VALUE")
        choices[name] = int(value) if value.lstrip("-").isdigit() else value
    return choices
