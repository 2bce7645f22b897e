"""Ideals of a graph: the sets of pieces that contain all their predecessors. A graph can be cut at each of them.

Stages without cycles, in topological order, end at a growing sequence of ideals. Every such sequence is a plan.
Therefore a graph is planned like a chain whose positions are ideals (Tarnawski et al., Efficient Algorithms for Device
Placement of DNN Graph Operators, 2020).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tvm_split.planner.search.instance import Flags, Instance

MOST_IDEALS = 1200
"""Most ideals that are listed; beyond that, only those on a few topological orders are, and they prove no bound."""


@dataclass(frozen=True)
class Ideals:
    """Ideals as a (P, n) table: whether ideal P has piece n, smallest first; ``complete`` if there are no others."""

    members: Flags
    complete: bool


def ideals_of(instance: Instance) -> Ideals:
    """Return all ideals, or, if they are too many, those on a few different topological orders."""
    before = predecessors(instance)
    length = len(instance.pieces)
    if instance.is_chain:
        return Ideals(np.tri(length + 1, length, -1, dtype=bool), complete=True)
    needed = [sum(1 << other for other in each) for each in before]
    found = {0}
    frontier = [0]
    while frontier and len(found) <= MOST_IDEALS:
        following = set()
        for ideal in frontier:
            for piece in range(length):
                if not ideal >> piece & 1 and needed[piece] & ~ideal == 0:
                    following.add(ideal | 1 << piece)
        frontier = list(following - found)
        found |= following
    complete = len(found) <= MOST_IDEALS
    if not complete:
        found = {ideal for order in topological_orders(instance) for ideal in _prefixes(order)}
    ordered = sorted(found, key=lambda ideal: (ideal.bit_count(), ideal))
    members = np.array([[bool(ideal >> piece & 1) for piece in range(length)] for ideal in ordered])
    return Ideals(members.reshape(len(ordered), length), complete)


def predecessors(instance: Instance) -> list[set[int]]:
    """Return the direct predecessors of each piece."""
    found: list[set[int]] = [set() for _ in instance.pieces]
    for tensor in instance.tensors:
        if tensor.source != instance.client:
            for piece in tensor.destinations:
                if piece != instance.client:
                    found[piece].add(tensor.source)
    return found


def successors(before: list[set[int]]) -> list[list[int]]:
    """Return the direct successors of each piece, in their order."""
    found: list[list[int]] = [[] for _ in before]
    for piece, each in enumerate(before):
        for other in each:
            found[other].append(piece)
    return found


def dividing_pieces(instance: Instance) -> list[int]:
    """Return the pieces that are a predecessor or a successor (direct or not) of every other piece."""
    before = predecessors(instance)
    length = len(before)
    above = [0] * length
    for piece, each in enumerate(before):
        for other in each:
            above[piece] |= above[other] | 1 << other
    below = [0] * length
    for piece in range(length):
        for other in range(piece):
            if above[piece] >> other & 1:
                below[other] += 1
    return [piece for piece in range(length) if above[piece].bit_count() + below[piece] == length - 1]


def topological_orders(instance: Instance) -> list[list[int]]:
    """Return five topological orders: as given, by level from the inputs and from the outputs, two depth-first."""
    before = predecessors(instance)
    length = len(before)
    behind = successors(before)
    depth = [0] * length
    height = [0] * length
    for piece in range(length):
        depth[piece] = max((depth[other] + 1 for other in before[piece]), default=0)
    for piece in reversed(range(length)):
        height[piece] = max((height[other] + 1 for other in behind[piece]), default=0)
    orders = [list(range(length)), sorted(range(length), key=lambda piece: (depth[piece], piece))]
    orders.append(sorted(range(length), key=lambda piece: (-height[piece], piece)))
    for sign in (1, -1):
        orders.append(_depth_first(before, behind, sign))
    return orders


def _prefixes(order: list[int]) -> Iterable[int]:
    ideal = 0
    yield ideal
    for piece in order:
        ideal |= 1 << piece
        yield ideal


def _depth_first(before: list[set[int]], behind: list[list[int]], sign: int) -> list[int]:
    waiting = [len(each) for each in before]
    ready = sorted((piece for piece, count in enumerate(waiting) if count == 0), key=lambda piece: sign * piece)
    order = []
    while ready:
        piece = ready.pop()
        order.append(piece)
        for other in sorted(behind[piece], key=lambda each: sign * each):
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    return order
