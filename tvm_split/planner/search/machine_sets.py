"""The sets of machines that can hold a stage, one by one, for a search that places pieces on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Flags, Floats, Instance
from tvm_split.planner.search.machine_classes import machine_classes

Value = TypeVar("Value", np.float64, np.bool_)


@dataclass(frozen=True)
class MachineSets:
    """S sets: the single machines by their own numbers, then, with replicas, all larger ones.

    The client is the set behind the last; its first machine is the one behind the last.

    Attributes:
        members: the machines of each set, in their order. first: (S + 1,) the first of them, by which a stage goes.
        predecessors: of each set the machines that must be in use before it: equal machines are taken in order.
        allowed: (n, S) whether all members can run a piece. memory: (S + 2,) the least of the members; infinite for
            the client, and for no set, −1.
        linked, seconds_per_byte, latency: (S + 1, S + 1), row the source: of the worst of the members' links.
    """

    members: tuple[tuple[int, ...], ...]
    first: npt.NDArray[np.intp]
    predecessors: tuple[tuple[int, ...], ...]
    allowed: Flags
    memory: Floats
    linked: Flags
    seconds_per_byte: Floats
    latency: Floats


def count_of_sets(instance: Instance) -> int:
    """So many sets at most may hold a stage; 1023 for ten unlike machines with replicas."""
    if not instance.problem.replicas:
        return len(instance.machines)
    return math.prod(1 + math.comb(len(members) + 1, 2) for members in machine_classes(instance)) - 1


def machine_sets(instance: Instance) -> MachineSets:
    """The sets that a stage of an instance may be on."""
    classes = machine_classes(instance)
    twin = {later: earlier for members in classes for earlier, later in itertools.pairwise(members)}
    machines = len(instance.machines)
    singles = [(machine,) for machine in range(machines)]
    larger = _larger_sets(classes, instance.machine_limit) if instance.problem.replicas else []
    members = (*singles, *larger)
    with_client = [*members, (machines,)]
    return MachineSets(
        members=members,
        first=np.array([each[0] for each in with_client], dtype=np.intp),
        predecessors=tuple(
            tuple(twin[machine] for machine in each if machine in twin and twin[machine] not in each)
            for each in members
        ),
        allowed=np.stack([np.isfinite(instance.seconds[:, list(each)]).all(axis=1) for each in members], axis=1),
        memory=np.array([*(instance.memory[list(each)].min() for each in members), math.inf, math.inf]),
        linked=~_worst(~instance.linked, with_client),
        seconds_per_byte=_worst(instance.seconds_per_byte, with_client),
        latency=_worst(instance.latency, with_client),
    )


def _larger_sets(classes: Sequence[Sequence[int]], limit: int) -> list[tuple[int, ...]]:
    """Sets of two machines and more, of equal machines successive ones only."""
    runs = [
        [(), *(tuple(each[start:end]) for start, end in itertools.combinations(range(len(each) + 1), 2))]
        for each in classes
    ]
    found = [tuple(sorted(itertools.chain(*chosen))) for chosen in itertools.product(*runs)]
    return [each for each in found if 1 < len(each) <= limit]


def _worst(values: npt.NDArray[Value], sets: Sequence[tuple[int, ...]]) -> npt.NDArray[Value]:
    """For every two sets the largest value of their members' pairs."""
    rows = np.stack([values[list(each)].max(axis=0) for each in sets])
    return np.stack([rows[:, list(each)].max(axis=1) for each in sets], axis=1)
