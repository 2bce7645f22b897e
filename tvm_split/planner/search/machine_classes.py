"""Classes of identical machines, and the groups of machines that can hold one stage.

A search over sets of machines has 2 ** machines states. A search over the number of machines of each class has the
product of (class size + 1) states: nine instead of 256 for eight identical machines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from tvm_split.planner.search.instance import Flags, Floats, Instance

Counts = tuple[int, ...]
"""Number of machines of each class."""


@dataclass(frozen=True)
class Groups:
    """Groups of machines that can hold a stage: one machine, or with replicas any set of machines.

    Attributes:
        classes: the machines of each class. counts: for each group, the number of machines of each class.
        seconds_per_byte, latency: (G + 1, G + 1) of the slowest link from a group to another; infinite latency if a
            pair of machines is not linked. The last row and column are the client's.
    """

    classes: tuple[tuple[int, ...], ...]
    counts: tuple[Counts, ...]
    seconds_per_byte: Floats
    latency: Floats

    def machines(self, sequence: list[int]) -> list[tuple[int, ...]]:
        """Return the machines of each group of a sequence; no machine occurs twice."""
        left = [list(members) for members in self.classes]
        return [
            tuple(left[kind].pop(0) for kind, count in enumerate(self.counts[group]) for _ in range(count))
            for group in sequence
        ]


def machine_classes(instance: Instance) -> tuple[tuple[int, ...], ...]:
    """Return classes of machines that can be exchanged without changing a plan's value, ordered by first machine."""
    likely: dict[Hashable, list[list[int]]] = {}
    for machine in range(len(instance.machines)):
        sets = tuple(place for place, (members, _) in enumerate(instance.core_sets) if machine in members)
        own = replace(instance.problem.machines[machine], name="")
        classes = likely.setdefault((own, instance.seconds[:, machine].tobytes(), sets), [])
        identical = next((members for members in classes if _have_same_links(instance, members[0], machine)), None)
        if identical is None:
            classes.append([machine])
        else:
            identical.append(machine)
    return tuple(sorted(tuple(members) for classes in likely.values() for members in classes))


def groups_of(instance: Instance, classes: tuple[tuple[int, ...], ...], *, replicas: bool) -> Groups:
    """Return the groups that may hold a stage: single machines, and with ``replicas`` also all larger sets."""
    counts = tuple(_group_counts(classes, replicas, instance.machine_limit))
    kinds = [*([kind for kind, count in enumerate(each) if count] for each in counts), [len(classes)]]
    slow, lag = _class_links(instance, (*classes, (instance.client,)))
    shape = (len(kinds), len(kinds))
    seconds_per_byte, latency = np.zeros(shape), np.zeros(shape)
    for source, end in itertools.product(range(len(kinds)), repeat=2):
        pairs = np.ix_(kinds[source], kinds[end])
        seconds_per_byte[source, end], latency[source, end] = slow[pairs].max(), lag[pairs].max()
    return Groups(classes, counts, seconds_per_byte, latency)


def _group_counts(classes: tuple[tuple[int, ...], ...], replicas: bool, limit: int) -> list[Counts]:
    if not replicas:
        return [tuple(int(kind == other) for other in range(len(classes))) for kind in range(len(classes))]
    every = itertools.product(*(range(len(members) + 1) for members in classes))
    return [counts for counts in every if 0 < sum(counts) <= limit]


def _class_links(instance: Instance, classes: tuple[tuple[int, ...], ...]) -> tuple[Floats, Floats]:
    shape = (len(classes), len(classes))
    slow, lag = np.zeros(shape), np.full(shape, math.inf)
    for source, end in itertools.product(range(len(classes)), repeat=2):
        pair = classes[source][0], classes[end][-1]
        if pair[0] != pair[1] and instance.linked[pair]:
            slow[source, end], lag[source, end] = instance.seconds_per_byte[pair], instance.latency[pair]
    return slow, lag


def _have_same_links(instance: Instance, one: int, other: int) -> bool:
    """Whether two machines have equal links to and from all others, and to each other."""
    links = (instance.linked, instance.seconds_per_byte, instance.latency)
    return all(_same_links(values, one, other) for values in links)


def _same_links(values: Floats | Flags, one: int, other: int) -> bool:
    rest = np.ones(len(values), dtype=bool)
    rest[[one, other]] = False
    return bool(
        values[one, other] == values[other, one]
        and np.array_equal(values[one, rest], values[other, rest])
        and np.array_equal(values[rest, one], values[rest, other])
    )
