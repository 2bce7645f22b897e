"""Templates: schedules with named choices, which a cost rule picks without measuring, or tuning picks by measuring.

A new family of kernels needs two functions: one returns the choices that a kernel of the family leaves open, the
other schedules the kernel by choices. This module and `schedules.tuning` provide the rest: the default
kernel, tuning and its database.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tvm import s_tir, tirx

from schedules.blocks import Parts, anchors_of, find_parts, new_schedule
from schedules.prefetch import prefetch_weights

CHOICES_ATTRIBUTE = "tvm_split.choices"
"""PrimFunc attribute: the template's choices for this kernel, as text."""
SCHEDULE_ATTRIBUTE = "tvm_split.schedule"
"""PrimFunc attribute: the name of the rule that scheduled the function; `schedules.chosen_rules` lists these names."""
IS_SCHEDULED = "tirx.is_scheduled"
"""PrimFunc attribute of TVM's: nothing schedules the function again."""

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

    def contains(self, choices: Choices) -> bool:
        return (
            choices.keys() == self.axes.keys()
            and all(choices[name] in values for name, values in self.axes.items())
            and self.allows(choices)
        )

    def all_choices(self) -> Iterator[Choices]:
        """Yield every allowed combination; the last axis changes fastest."""
        for values in itertools.product(*self.axes.values()):
            choices = dict(zip(self.axes, values, strict=True))
            if self.allows(choices):
                yield choices


Machine = TypeVar("Machine")
"""A template's description of the machine: `traits.Traits` for a CPU, `gpu.tile.Gpu` for a GPU."""


@dataclass(frozen=True)
class Template(Generic[Machine]):
    """A family of kernels around an anchor block named ``anchor``, whose schedule has choices.

    ``find_space`` returns the choices for the parts of a kernel. ``apply`` schedules a kernel by choices from that
    space.
    """

    name: str
    anchor: str
    find_space: Callable[[Parts, Machine], Space]
    apply: Callable[[s_tir.Schedule, Parts, Choices, Machine], None]

    def space(self, function: tirx.PrimFunc, machine: Machine) -> Space | None:
        """Return the choices for a function, or None if the function is not of this family."""
        if self.anchor not in anchors_of(function):
            return None
        parts = find_parts(new_schedule(function), self.anchor)
        return None if parts is None else self.find_space(parts, machine)

    def kernel(self, function: tirx.PrimFunc, machine: Machine, choices: Choices) -> tirx.PrimFunc:
        """Return the function scheduled with ``choices``, which become its attribute `CHOICES_ATTRIBUTE`.

        Raises:
            ValueError: the function is not of this family.
        """
        schedule = new_schedule(function)
        parts = find_parts(schedule, self.anchor)
        if parts is None:
            raise ValueError(f"the function has no single anchor of family {self.anchor!r}")
        self.apply(schedule, parts, choices, machine)
        return prefetch_weights(schedule.mod["main"]).with_attr(CHOICES_ATTRIBUTE, text_of(choices))

    def rule(self, function: tirx.PrimFunc, machine: Machine) -> tirx.PrimFunc | None:
        """Return the function scheduled with the cost rule's choices; None if it is not of this family."""
        space = self.space(function, machine)
        return None if space is None else self.kernel(function, machine, space.default)


def space_of(values: Mapping[str, Iterable[Value]], default: Choices, allows: Callable[[Choices], bool]) -> Space:
    """Return a space of the values to try; the values of ``default`` are added where they are missing."""
    axes = {name: tuple(dict.fromkeys([*candidates, default[name]])) for name, candidates in values.items()}
    return Space(axes, default, allows)


def text_of(choices: Choices) -> str:
    """Return choices as readable text, such as ``chunk=all tile=7x4``; equal choices give equal text."""
    return " ".join(f"{name}={choices[name]}" for name in sorted(choices))


def choices_from(text: str) -> Choices:
    """Return the choices in a text that `text_of` wrote.

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
