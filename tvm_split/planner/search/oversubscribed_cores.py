"""Machines on oversubscribed cores, for a search that fills one stage after the other.

The search uses only as many machines as have cores of their own. This loses nothing if pieces are small, and needs
fewer transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.order_costs import Units

Counts = npt.NDArray[np.intp]


@dataclass(frozen=True)
class OversubscribedCores:
    """A set of ``cores`` shared by machines that want more of them; ``wanted`` is the number of cores per machine."""

    wanted: dict[int, int]
    cores: int

    @property
    def oversubscription(self) -> float:
        """Cores wanted divided by cores available: the slowdown when all machines compute at the same time."""
        return sum(self.wanted.values()) / self.cores


def oversubscribed_cores(instance: Instance) -> tuple[OversubscribedCores, ...]:
    """Return the oversubscribed sets of cores of an instance; the client's use of cores is not counted."""
    own = [machine.cores for machine in instance.problem.machines]
    sets = (
        OversubscribedCores({each: own[each] for each in members if each != instance.client and own[each]}, cores)
        for members, cores in instance.core_sets
    )
    return tuple(each for each in sets if each.wanted and each.oversubscription > 1)


def counts_with_own_cores(units: Units, oversubscribed: Sequence[OversubscribedCores], worth: Floats) -> Counts:
    """Return the number of units of each kind to use such that their cores suffice; all units if all cores do.

    Args:
        worth: (K,) price of a unit's time; units with the least price per core are left out first.
    """
    needed = [_needed(units, each) for each in oversubscribed]
    counts = units.counts.copy()
    taken = np.sum(needed, axis=0) if needed else np.zeros(len(counts))
    order = np.argsort(-worth / np.maximum(taken, 1.0), kind="stable")
    for each, cores in zip(oversubscribed, needed, strict=True):
        left = float(each.cores)
        for kind in order[cores[order] > 0]:
            whole = int(left // cores[kind]) if left < each.cores else max(1, int(left // cores[kind]))
            counts[kind] = min(counts[kind], whole)
            left = max(0.0, left - counts[kind] * cores[kind])
    return counts


def pooled(units: Units, counts: Floats, oversubscribed: Sequence[OversubscribedCores]) -> tuple[Floats, Floats]:
    """Return seconds (n, K') and counts (K',) in which each oversubscribed core set replaces the machines on it.

    In every plan, the core time of these machines is at most cores × period. So a lower bound on the period for these
    kinds also holds for the machines. If a machine is in several sets, the most oversubscribed set counts.
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
    """Return (K,) the number of these cores that a unit of each kind keeps busy."""
    return np.array([sum(cores.wanted.get(machine, 0) for machine in each[0]) for each in units.members], dtype=float)
