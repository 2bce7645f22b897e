"""Some of an instance's machines: a search that goes by rules of thumb may do better with fewer of them.

Whatever a search finds for some machines is a plan for all. So who also looks at these is no worse with all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.machine_classes import machine_classes
from tvm_split.planner.search.placement import Placed
from tvm_split.planner.search.stage_beam import MOST_NEIGHBOURHOODS, neighbourhoods

Counts = npt.NDArray[np.intp]
Members = tuple[int, ...]
ONE_BY_ONE = 12
"""So many machines are left out one after the other; then a quarter of those that are left."""
SHRINKING = 0.75


def restricted(instance: Instance, members: Members) -> Instance:
    """The instance with some of its machines, in their order."""
    at = list(members)
    ends = [*at, instance.client]
    both = np.ix_(ends, ends)
    number = {machine: place for place, machine in enumerate(members)} | {instance.client: instance.client}
    sets = ((tuple(number[each] for each in held if each in number), cores) for held, cores in instance.core_sets)
    return replace(
        instance,
        problem=replace(instance.problem, machines=tuple(instance.problem.machines[each] for each in at)),
        machines=tuple(instance.machines[each] for each in at),
        times=instance.times[:, at],
        seconds=instance.seconds[:, at],
        memory=instance.memory[at],
        linked=instance.linked[both],
        seconds_per_byte=instance.seconds_per_byte[both],
        latency=instance.latency[both],
        transfer_seconds=instance.transfer_seconds[at],
        transfer_seconds_per_byte=instance.transfer_seconds_per_byte[at],
        contention=instance.contention[at],
        alone_contention=instance.alone_contention[at],
        alone_transfer_seconds=instance.alone_transfer_seconds[at],
        core_sets=tuple((held, cores) for held, cores in sets if any(each != instance.client for each in held)),
    )


def among_all(members: Members, stages: Sequence[Placed]) -> list[Placed]:
    """Stages of a restricted instance by the numbers of the whole one."""
    return [Placed(tuple(members[each] for each in stage.machines), stage.pieces) for stage in stages]


def nested(instance: Instance) -> list[Members]:
    """Ever smaller sets: the first machines of the problem, and the fastest ones; and the machines of each place."""
    count = len(instance.machines)
    whole = np.where(np.isfinite(instance.seconds), instance.seconds, 0.0).sum(axis=0)
    fastest = np.argsort(whole, kind="stable").tolist()
    found: dict[Members, None] = {}
    size = count - 1
    while size > 1:
        found[tuple(range(size))] = None
        found[tuple(sorted(fastest[:size]))] = None
        size = size - 1 if count - size < ONE_BY_ONE else int(size * SHRINKING)
    places = _places(instance)
    if 1 < len(places) <= MOST_NEIGHBOURHOODS:
        found |= dict.fromkeys(each for each in places if len(each) > 1)
    return list(found)


def least_left_out(counts: Sequence[int], worth: Floats) -> Iterator[tuple[int, ...]]:
    """How many machines of each kind to leave out: what is worth least together comes first; not none, never all."""
    none = (0,) * len(counts)
    waiting, seen = [(0.0, none)], {none}
    while waiting:
        value, left_out = heapq.heappop(waiting)
        if sum(left_out) == sum(counts):
            continue
        if any(left_out):
            yield left_out
        for kind, count in enumerate(counts):
            more = (*left_out[:kind], left_out[kind] + 1, *left_out[kind + 1 :])
            if left_out[kind] < count and more not in seen:
                seen.add(more)
                heapq.heappush(waiting, (value + float(worth[kind]), more))


def _places(instance: Instance) -> list[Members]:
    classes = machine_classes(instance)
    first = np.array([members[0] for members in classes])
    links = np.where(instance.linked, instance.seconds_per_byte, np.inf)[np.ix_(first, first)]
    for kind, members in enumerate(classes):
        links[kind, kind] = instance.seconds_per_byte[members[0], members[-1]] if len(members) > 1 else np.inf
    group_of, _ = neighbourhoods(links, np.array([len(members) for members in classes]))
    found: dict[int, list[int]] = {}
    for group, members in zip(group_of.tolist(), classes, strict=True):
        found.setdefault(group, []).extend(members)
    return [tuple(sorted(members)) for members in found.values()]
