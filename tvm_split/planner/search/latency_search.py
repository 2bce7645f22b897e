"""The least latency, along orders of the pieces: on all machines, and on fewer of them, with wider and wider beams.

With all the time there is, what is found for an instance is at least as good as for its first machines alone, one less
each time (`subsets.nested`): these are looked at in just the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from tvm_split.planner.problem import TOLERANCE
from tvm_split.planner.search.ideals import topological_orders
from tvm_split.planner.search.instance import Instance
from tvm_split.planner.search.latency_beam import LatencyBeam, LatencyOrder
from tvm_split.planner.search.latency_bound import LatencyBound
from tvm_split.planner.search.placement import Placed
from tvm_split.planner.search.subsets import Members, among_all, nested, restricted

WIDTHS = (2, 8, 32, 128)
"""Ways that are kept at each cut, one after the other as long as there is time."""


def search_latencies(
    instance: Instance,
    bound: LatencyBound,
    keep: Callable[[list[Placed]], float],
    deadline: float,
    widths: Sequence[int] = WIDTHS,
    *,
    least: float = math.inf,
) -> None:
    """Until the deadline (monotonic), but until there is any plan whatever the time.

    Args:
        bound: of the instance.
        keep: takes stages that are to be measured; gives the least latency known, in seconds.
        least: what is known before.
    """
    orders: list[LatencyOrder] = []
    everything = tuple(range(len(instance.machines)))
    beams: dict[Members, list[LatencyBeam]] = {everything: []}
    for pieces in {tuple(each): None for each in topological_orders(instance)}:
        if math.isfinite(least) and time.monotonic() > deadline:
            return
        orders.append(LatencyOrder(instance, pieces))
        beams[everything].append(LatencyBeam(instance, orders[-1], bound))
        for stages in beams[everything][-1].plans(widths[0], deadline if math.isfinite(least) else math.inf):
            least = keep(stages)
    fewer = nested(instance)
    for members, width in [
        *((everything, width) for width in widths[:-1]),
        *((members, width) for width in widths[:-1] for members in fewer),
        *((members, widths[-1]) for members in (everything, *fewer)),
    ]:
        if time.monotonic() > deadline or least <= bound.whole * (1 + TOLERANCE):
            return
        if members not in beams:
            beams[members] = _beams(restricted(instance, members), orders, least, deadline)
        for beam in beams[members]:
            for stages in beam.plans(width, deadline):
                least = keep(among_all(members, stages))


def _beams(instance: Instance, orders: Sequence[LatencyOrder], least: float, deadline: float) -> list[LatencyBeam]:
    """Along all orders; none where no plan can be better than the best one known."""
    if np.isinf(instance.seconds).all(axis=1).any():
        return []
    bound = LatencyBound(instance, deadline)
    return [] if bound.whole > least else [LatencyBeam(instance, order, bound) for order in orders]
