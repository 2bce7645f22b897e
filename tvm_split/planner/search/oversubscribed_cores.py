"""Machines that share too few cores, for the search that fills stages one after the other, each by itself.

Such a search is shown them in two ways. Either only as many of them as have cores of their own: nothing is lost by it
where pieces are small, and fewer tensors cross. Or all of them, each slowed to its part of the cores: what fits them
all fits the cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.order_costs import Units

Counts = npt.NDArray[np.intp]


@dataclass(frozen=True)
class OversubscribedCores:
    """So many ``cores``, fewer than what the machines in ``wanted`` would keep busy, each as many as it says."""

    wanted: dict[int, int]
    cores: int

    @property
    def oversubscription(self) -> float:
        """How many times longer all of them compute together than each alone."""
        return sum(self.wanted.values()) / self.cores


def oversubscribed_cores(instance: Instance) -> tuple[OversubscribedCores, ...]:
    """The sets of cores that are too few for their machines; what the client takes of them is not counted."""
    own = [machine.cores for machine in instance.problem.machines]
    sets = (
        OversubscribedCores({each: own[each] for each in members if each != instance.client and own[each]}, cores)
        for members, cores in instance.core_sets
    )
    return tuple(each for each in sets if each.wanted and each.oversubscription > 1)


def ways_to_count(
    units: Units, oversubscribed: Sequence[OversubscribedCores], worth: Floats
) -> Iterator[tuple[Units, Counts]]:
    """Units, and how many of each kind may be used, so that their cores suffice; just these, where all cores do.

    Args:
        worth: (K,) of a unit's time; where some are left out, those of the least worth by the cores that they take.
    """
    needed = [_needed(units, each) for each in oversubscribed]
    if not any(each.any() for each in needed):
        yield units, units.counts
        return
    yield units, _with_own_cores(units, oversubscribed, needed, worth)
    longer = np.ones(len(units.counts))
    for each, cores in zip(oversubscribed, needed, strict=True):
        longer[cores > 0] = np.maximum(longer[cores > 0], each.oversubscription)
    slowed = replace(
        units,
        seconds=units.seconds * longer,
        transfer_seconds=units.transfer_seconds * longer,
        transfer_seconds_per_byte=units.transfer_seconds_per_byte * longer,
    )
    yield slowed, units.counts


def pooled(units: Units, counts: Floats, oversubscribed: Sequence[OversubscribedCores]) -> tuple[Floats, Floats]:
    """Seconds and counts as of kinds of machines, in which cores that are too few stand for the machines on them.

    Whatever plan there is, what these machines compute, each on its cores, is at most cores × period; so a bound of the
    period for these kinds is one for the machines. Of several sets of a machine, the most oversubscribed counts.
    """
    seconds, found = units.seconds.copy(), counts.astype(np.float64)
    columns, cores = [], []
    for each in sorted(oversubscribed, key=lambda one: -one.oversubscription):
        needed = np.where(found > 0, _needed(units, each), 0.0)
        here = needed > 0
        if here.any() and float(needed @ found) > each.cores:
            columns.append((seconds[:, here] * needed[here]).min(axis=1))
            cores.append(float(each.cores))
            found[here] = 0.0
    left = found > 0
    return np.column_stack([seconds[:, left], *columns]), np.concatenate([found[left], cores])


def _needed(units: Units, cores: OversubscribedCores) -> Floats:
    """(K,) how many of the cores a unit of each kind keeps busy."""
    return np.array([sum(cores.wanted.get(machine, 0) for machine in each[0]) for each in units.members], dtype=float)


def _with_own_cores(
    units: Units, oversubscribed: Sequence[OversubscribedCores], needed: Sequence[Floats], worth: Floats
) -> Counts:
    counts = units.counts.copy()
    taken = np.sum(needed, axis=0)
    order = np.argsort(-worth / np.maximum(taken, 1.0), kind="stable")
    for each, cores in zip(oversubscribed, needed, strict=True):
        left = float(each.cores)
        for kind in order[cores[order] > 0]:
            whole = int(left // cores[kind]) if left < each.cores else max(1, int(left // cores[kind]))
            counts[kind] = min(counts[kind], whole)
            left = max(0.0, left - counts[kind] * cores[kind])
    return counts
