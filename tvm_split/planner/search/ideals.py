"""Where a graph can be cut: ideals, the sets of pieces that have all their predecessors in them.

Stages without circles, in topological order, end at a growing sequence of ideals, and every such sequence is a plan. So
a graph is planned like a chain whose positions are ideals (Tarnawski et al., Efficient Algorithms for Device Placement
of DNN Graph Operators, 2020). What a stage exchanges depends on where other stages are, beyond its neighbours: the
costs here take the best link a machine has, and a tensor as sent once; only behind a piece that divides the graph, the
next stage surely gets a tensor of it from the stage before. The value of the best sequence is a lower bound then, and
it is that of its plan wherever links are equal and no tensor goes to two stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_split.planner.search.instance import Flags, Floats, Instance
from tvm_split.planner.search.machine_classes import Groups
from tvm_split.planner.search.stage_costs import StageCosts, shared

MOST_IDEALS = 1200
"""A graph with more has only those on a few topological orders searched; then nothing is proven by it."""


@dataclass(frozen=True)
class Ideals:
    """(P, n) whether an ideal has a piece, the smallest first; ``complete`` if there are no others."""

    members: Flags
    complete: bool


def ideals_of(instance: Instance) -> Ideals:
    """All ideals, or those that are on a few different topological orders."""
    before = predecessors(instance)
    length = len(instance.pieces)
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
    """The pieces that each piece needs directly."""
    found: list[set[int]] = [set() for _ in instance.pieces]
    for tensor in instance.tensors:
        if tensor.source != instance.client:
            for piece in tensor.destinations:
                if piece != instance.client:
                    found[piece].add(tensor.source)
    return found


def successors(before: list[set[int]]) -> list[list[int]]:
    """The pieces that need each piece directly, in their order."""
    found: list[list[int]] = [[] for _ in before]
    for piece, each in enumerate(before):
        for other in each:
            found[other].append(piece)
    return found


def dividing_pieces(instance: Instance) -> list[int]:
    """Pieces that are before or behind every other one."""
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
    """A few different ones: as given, branch after branch, and level by level, forwards and backwards."""
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


def ideal_costs(instance: Instance, groups: Groups, ideals: Ideals, *, optimistic: bool) -> StageCosts:
    """Costs of stages between ideals; never above the true ones if ``optimistic``, else with the slowest links."""
    members = ideals.members.astype(np.float64)
    sizes = members.sum(axis=1)
    # Row where a stage ends, column where it begins: the smaller ideal must be inside the larger one.
    inside = (members @ members.T == sizes[None, :]) & (sizes[:, None] > sizes[None, :])
    traffic = _traffic(instance, ideals)
    weights = _difference(members @ instance.weights)
    exchanged = traffic.received + traffic.sent + traffic.from_client + traffic.to_client
    memory = weights + _largest(instance.activations, ideals) + instance.problem.buffers * exchanged
    alone, full = [], []
    for machine in (members_of_class[0] for members_of_class in groups.classes):
        allowed = np.isfinite(instance.seconds[:, machine])
        seconds = _difference(members @ np.where(allowed, instance.seconds[:, machine], 0.0))
        possible = inside & (_difference(members @ ~allowed) == 0) & (memory <= instance.memory[machine] * (1 + 1e-9))
        compute = seconds * instance.contention[machine] + traffic.tensors * instance.transfer_seconds[machine]
        compute += exchanged * instance.transfer_seconds_per_byte[machine]
        alone.append(np.where(possible, seconds, math.inf))
        full.append(np.where(possible, compute, math.inf))
    period, latency = [], []
    for number, group in enumerate(groups.counts):
        kinds = [kind for kind, count in enumerate(group) if count]
        ends = [groups.classes[kind][0] for kind in kinds]
        into, outof = (_link(instance, ends, incoming, optimistic) for incoming in (True, False))
        from_client, to_client = groups.seconds_per_byte[-1, number], groups.seconds_per_byte[number, -1]
        receive = _wire(traffic.received, into[0], traffic.tensors_in) + traffic.from_client * from_client
        send = _wire(traffic.sent, outof[0], traffic.tensors_out) + traffic.to_client * to_client
        compute = shared([(full[kind], group[kind]) for kind in kinds])
        period.append(np.maximum(np.maximum(compute, receive), send))
        slowest = np.maximum.reduce([alone[kind] for kind in kinds])
        latency.append(slowest + receive + np.where(traffic.tensors_in > 0, into[1], 0.0))
    sure, crosses = _sure_crossings(instance, ideals)
    if not optimistic:
        crosses = np.ones(len(members))
    linked = dataclasses.replace(groups, latency=np.where(np.isinf(groups.latency), math.inf, 0.0))
    return StageCosts(linked, tuple(period), tuple(latency), sure, crosses, memory)


def _sure_crossings(instance: Instance, ideals: Ideals) -> tuple[Floats, Floats]:
    """(P,) bytes that pass from the stage before an ideal's end to the next one whatever they are, and whether any do.

    All pieces behind a dividing one depend on it, and those that are next do so directly.
    """
    sizes, crosses = np.zeros(len(ideals.members)), np.zeros(len(ideals.members))
    counts = ideals.members.sum(axis=1)
    for piece in dividing_pieces(instance):
        made = [
            tensor.bytes
            for tensor in instance.tensors
            if tensor.source == piece and any(end != instance.client for end in tensor.destinations)
        ]
        at = np.flatnonzero(ideals.members[:, piece] & (counts == piece + 1))
        if made:
            sizes[at], crosses[at] = min(made), 1.0
    return sizes, crosses


@dataclass
class _Traffic:
    """(P, P) of a stage: bytes and numbers of tensors that it exchanges, if each is sent once."""

    received: Floats
    sent: Floats
    from_client: Floats
    to_client: Floats
    tensors_in: Floats
    tensors_out: Floats
    tensors: Floats


def _traffic(instance: Instance, ideals: Ideals) -> _Traffic:
    members = ideals.members
    shape = (len(members), len(members))
    found = _Traffic(*(np.zeros(shape) for _ in range(7)))
    for tensor in instance.tensors:
        ends = [piece for piece in tensor.destinations if piece != instance.client]
        reached = members[:, ends].sum(axis=1)
        arrives = reached[:, None] > reached[None, :]
        if tensor.source == instance.client:
            found.from_client += tensor.bytes * arrives
            found.tensors += arrives
            continue
        has = members[:, tensor.source]
        arrives &= has[None, :]
        made = has[:, None] & ~has[None, :]
        leaves = made & (reached < len(ends))[:, None]
        found.received += tensor.bytes * arrives
        found.sent += tensor.bytes * leaves
        found.tensors_in += arrives
        found.tensors_out += leaves
        found.tensors += arrives
        found.tensors += leaves
        if instance.client in tensor.destinations:
            found.to_client += tensor.bytes * made
            found.tensors += made
    return found


def _link(instance: Instance, machines: Sequence[int], incoming: bool, optimistic: bool) -> tuple[float, float]:
    """Seconds per byte and latency of the best or worst link of machines, of which the slowest counts.

    Infinite if one of them has no link.
    """
    pick = np.min if optimistic else np.max
    found = []
    for machine in machines:
        rows = (slice(None, -1), machine) if incoming else (machine, slice(None, -1))
        linked = instance.linked[rows]
        if not linked.any():
            return math.inf, math.inf
        found.append((pick(instance.seconds_per_byte[rows][linked]), pick(instance.latency[rows][linked])))
    return float(max(each for each, _ in found)), float(max(each for _, each in found))


def _wire(size: Floats, seconds_per_byte: float, tensors: Floats) -> Floats:
    if math.isinf(seconds_per_byte):
        return np.where(tensors > 0, math.inf, 0.0)
    return size * seconds_per_byte


def _difference(values: Floats) -> Floats:
    return np.asarray(values[:, None] - values[None, :], dtype=np.float64)


def _largest(values: Floats, ideals: Ideals) -> Floats:
    members = ideals.members
    found = np.zeros((len(members), len(members)))
    for piece in np.argsort(values):
        if values[piece] > 0:
            has = members[:, piece]
            found[has[:, None] & ~has[None, :]] = values[piece]
    return found


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
