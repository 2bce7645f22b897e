"""A problem of many machines in few words: those that are alike as groups, of seconds and of links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rpc_runtime.program.program import CLIENT
from tvm_split.planner.problem import Problem, ProblemLink
from tvm_split.planner.search.groups import entries_of_pairs
from tvm_split.planner.search.instance import Instance, instance_of
from tvm_split.planner.search.machine_classes import classes_of, have_same_links

MOST_LISTED = 16
"""Machines of which every link is listed."""

Classes = Sequence[tuple[int, ...]]


def with_groups(problem: Problem) -> Problem:
    """The same problem, of more than `MOST_LISTED` machines with groups: those of equal seconds are a ``kind``, those
    that have the same links a ``place``. One that has groups already is left as it is.

    Raises:
        PlanError: the problem makes no sense.
    """
    if problem.groups or len(problem.machines) <= MOST_LISTED:
        return problem
    instance = instance_of(problem)
    taken = {*instance.machines, CLIENT}
    kinds = classes_of(instance, lambda machine: instance.times[:, machine].tobytes(), lambda one, other: True)
    kind_names, kind_groups = _named("kind", kinds, instance.machines, taken)
    places = classes_of(instance, partial(_links_key, instance), partial(have_same_links, instance))
    place_names, place_groups = _named("place", places, instance.machines, taken)
    row_of = {name: row for row, name in enumerate(instance.pieces)}
    pieces = []
    for piece in problem.pieces:
        row = instance.times[row_of[piece.name]]
        seconds = {name: float(row[own[0]]) for name, own in zip(kind_names, kinds, strict=True)}
        pieces.append(replace(piece, seconds={name: each for name, each in seconds.items() if math.isfinite(each)}))
    return replace(
        problem,
        groups={**kind_groups, **place_groups},
        pieces=tuple(pieces),
        links=tuple(_links(problem, [*places, (instance.client,)], [*place_names, CLIENT])),
    )


def _links_key(instance: Instance, machine: int) -> bytes:
    """Equal for machines of one place, where each is a link to the others."""
    ends = [
        np.sort(values[at])
        for values in (instance.linked, instance.seconds_per_byte, instance.latency)
        for at in (np.s_[machine, :], np.s_[:, machine])
    ]
    return b"".join(each.tobytes() for each in ends)


def _named(
    word: str, classes: Classes, machines: Sequence[str], taken: set[str]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """A name for each class: the machine's where it is one, else a group's, that nothing else has."""
    names, groups = [], {}
    for number, own in enumerate(classes):
        name = machines[own[0]]
        if len(own) > 1:
            name = f"{word}-{number}"
            while name in taken:
                name += "-"
            groups[name] = tuple(machines[each] for each in own)
        names.append(name)
    taken |= groups.keys()
    return names, groups


def _links(problem: Problem, places: Classes, names: Sequence[str]) -> Iterator[ProblemLink]:
    entries, _ = entries_of_pairs(problem, {})
    for (one, source), (other, end) in itertools.product(zip(places, names, strict=True), repeat=2):
        entry = entries[one[0], other[-1]]
        if entry >= 0:
            yield replace(problem.links[entry], source=source, destination=end)
