"""Costs of every stage between two ideals of a graph, on each group of machines.

An ideal is a set of pieces that contains all their predecessors; a graph can be cut at each of them. Stages without
cycles, in topological order, end at a growing sequence of ideals, and every such sequence is a plan (Tarnawski et al.,
Efficient Algorithms for Device Placement of DNN Graph Operators, 2020). The ideals of a chain are its prefixes.

The costs of a chain are exact. In other graphs, the transfers of a stage also depend on stages that are not adjacent.
There the costs assume the machine's best link, and that each tensor is sent once, so the value of the best sequence is
a lower bound. It is the value of its plan if links are equal and no tensor goes to two stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_split.placement.problem import TOLERANCE
from tvm_split.placement.search.instance import Flags, Floats, Instance

MOST_IDEALS = 1200
"""Most ideals that are listed."""
ROUNDING = 1e-14
"""Relative size, to the sums, below which a difference of two sums counts as 0."""
Counts = tuple[int, ...]
"""Number of machines of each class."""


def ideals_of(instance: Instance) -> Flags | None:
    """Return all ideals as a (P, n) table, whether ideal P has piece n, smallest first; None if they are too many."""
    length = len(instance.pieces)
    if instance.is_line:
        return np.tri(length + 1, length, -1, dtype=bool)
    needed = [sum(1 << predecessor for predecessor in before) for before in instance.before]
    ideals, frontier = {0}, {0}
    while frontier:
        frontier = {
            ideal | 1 << piece
            for ideal in frontier
            for piece in range(length)
            if not ideal >> piece & 1 and needed[piece] & ~ideal == 0
        }
        ideals |= frontier
        if len(ideals) > MOST_IDEALS:
            return None
    ordered = sorted(ideals, key=lambda ideal: (ideal.bit_count(), ideal))
    return np.array([[bool(ideal >> piece & 1) for piece in range(length)] for ideal in ordered])


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


def groups_of(instance: Instance, *, replicas: bool) -> Groups:
    """Return the groups that may hold a stage: single machines, and with ``replicas`` also all larger sets."""
    classes, counts = instance.classes, tuple(map(tuple, np.eye(len(instance.classes), dtype=int).tolist()))
    if replicas:
        sizes = [range(len(members) + 1) for members in classes]
        counts = tuple(group for group in itertools.product(*sizes) if 0 < sum(group) <= instance.machine_limit)
    ends = [*([index for index, count in enumerate(group) if count] for group in counts), [len(classes)]]
    slow, lag = instance.class_links
    shape = (len(ends), len(ends))
    seconds_per_byte, latency = np.zeros(shape), np.zeros(shape)
    for source, end in itertools.product(range(len(ends)), repeat=2):
        pairs = np.ix_(ends[source], ends[end])
        seconds_per_byte[source, end], latency[source, end] = slow[pairs].max(), lag[pairs].max()
    return Groups(classes, counts, seconds_per_byte, latency)


@dataclass(frozen=True)
class StageCosts:
    """Costs of stages on G groups of machines, between P ideals; the first ideal is empty and the last has all pieces.

    A stage has two indices: the ideal at its end, then the ideal at its begin. It has the pieces of the first that are
    not in the second.

    Attributes:
        ideals: (P, n) flags.
        period, latency: G matrices [end, begin] of seconds. They cover compute and transfers, except the ``adjacent``
            ones. Infinite if there is no such stage or the group cannot hold it.
        work: for each set of shared cores the same, of the seconds of one core that a stage needs of them.
        adjacent: transfers [0, end] that certainly pass, over the link of their groups, from the stage that ends at an
            ideal to the next one.
    """

    groups: Groups
    ideals: Flags
    period: tuple[Floats, ...]
    latency: tuple[Floats, ...]
    work: tuple[tuple[Floats, ...], ...]
    adjacent: Transfers


def stage_costs(instance: Instance, groups: Groups, ideals: Flags) -> StageCosts:
    """Return stage costs that are never above the true ones."""
    members = ideals.astype(np.float64)
    received, sent, from_client, to_client = traffic = _traffic(instance, ideals)
    adjacent = _adjacent_transfers(instance, members)
    others = Transfers(np.maximum(received.bytes - adjacent.bytes, 0.0), received.tensors - adjacent.tensors)
    single, in_stream = _compute_seconds(instance, groups, members, traffic)
    period, latency, computing = [], [], []
    for number, group in enumerate(groups.counts):
        held_by = [index for index, count in enumerate(group) if count]
        machines = [groups.classes[index][0] for index in held_by]
        link_in, link_out = (_best_link(instance, machines, incoming) for incoming in (True, False))
        client_in, client_out = (
            (float(groups.seconds_per_byte[ends]), float(groups.latency[ends])) for ends in ((-1, number), (number, -1))
        )
        receive = received.stream_seconds(link_in) + from_client.stream_seconds(client_in)
        send = sent.stream_seconds(link_out) + to_client.stream_seconds(client_out)
        compute = shared_seconds([(in_stream[index], group[index]) for index in held_by])
        computing.append(compute)
        period.append(np.maximum(np.maximum(compute, receive), send))
        slowest = np.maximum.reduce([single[index] for index in held_by])
        latency.append(slowest + others.seconds(link_in) + from_client.seconds(client_in))
        latency[-1] += to_client.seconds(client_out)
    work = tuple(
        tuple(map(partial(_core_seconds, instance, sharing, groups.classes), groups.counts, computing))
        for sharing, _ in instance.core_sets
    )
    return StageCosts(groups, ideals, tuple(period), tuple(latency), work, adjacent)


def _compute_seconds(
    instance: Instance, groups: Groups, members: Floats, traffic: Sequence[Transfers]
) -> tuple[list[Floats], list[Floats]]:
    """Return seconds [end, begin] on one machine of each class: of a single micro-batch, and of each of a stream.

    Those of a stream include contention and what transfers take from computing. Infinite if a machine cannot hold the
    stage.
    """
    sizes = members.sum(axis=1)
    # The ideal at the begin must be inside the one at the end.
    inside = (members @ members.T == sizes[None, :]) & (sizes[:, None] > sizes[None, :])
    exchanged = sum((transfers.bytes for transfers in traffic), np.zeros(inside.shape))
    tensors = sum((transfers.tensors for transfers in traffic), np.zeros(inside.shape))
    memory_bytes = _difference(members @ instance.weight_bytes) + _largest(instance.activation_bytes, members > 0)
    memory_bytes = memory_bytes + instance.problem.buffers * exchanged
    single, in_stream = [], []
    for machine in (members_of_class[0] for members_of_class in groups.classes):
        allowed = np.isfinite(instance.seconds[:, machine])
        seconds = _difference(members @ np.where(allowed, instance.seconds[:, machine], 0.0))
        fits = memory_bytes <= instance.memory_bytes[machine] * (1 + TOLERANCE)
        possible = inside & (_difference(members @ ~allowed) == 0) & fits
        busy = seconds * instance.contention[machine] + tensors * instance.transfer_seconds[machine]
        busy += exchanged * instance.transfer_seconds_per_byte[machine]
        single.append(np.where(possible, seconds, math.inf))
        in_stream.append(np.where(possible, busy, math.inf))
    return single, in_stream


def _core_seconds(
    instance: Instance, sharing: Sequence[int], classes: tuple[tuple[int, ...], ...], group: Counts, compute: Floats
) -> Floats:
    """Return the seconds of one core that stages on a group of machines need of the cores that ``sharing`` share."""
    wanted = sum(
        count * instance.problem.machines[members[0]].cores
        for members, count in zip(classes, group, strict=True)
        if members[0] in sharing
    )
    return compute * wanted if wanted else np.where(np.isfinite(compute), 0.0, math.inf)


@dataclass(frozen=True)
class Transfers:
    """Bytes and number of transferred tensors: [end, begin] of a stage; [0, end] for those of `StageCosts.adjacent`."""

    bytes: Floats
    tensors: Floats

    def stream_seconds(self, link: tuple[float, float]) -> Floats:
        """Return seconds in a stream over a link (seconds per byte, latency in seconds); infinite without a link."""
        if math.isinf(link[1]):
            return np.where(self.tensors > 0, math.inf, 0.0)
        return self.bytes * link[0]

    def seconds(self, link: tuple[float, float]) -> Floats:
        """Return seconds of a single micro-batch: those of a stream and the latency."""
        return self.stream_seconds(link) + np.where(self.tensors > 0, link[1], 0.0)


_Term = tuple[Flags, Flags, float]
"""Bytes that a stage transfers if the first flag is set at its end and the second at its begin."""


def _traffic(instance: Instance, members: Flags) -> list[Transfers]:
    """Return transfers of stages: received, sent, from the client and to the client, if each tensor is sent once."""
    received: list[_Term] = []
    sent: list[_Term] = []
    from_client: list[_Term] = []
    to_client: list[_Term] = []
    for tensor in instance.tensors:
        ends = [piece for piece in tensor.destinations if piece != instance.client]
        reader_counts = members[:, ends].sum(axis=1)
        is_input = tensor.source == instance.client
        has = np.ones(len(members), dtype=bool) if is_input else members[:, tensor.source]
        # A stage needs the tensor if its end has more of the tensor's readers than its begin.
        into = from_client if is_input else received
        into += [(reader_counts > count, has & (reader_counts == count), tensor.bytes) for count in range(len(ends))]
        if not is_input:
            sent.append((has & (reader_counts < len(ends)), ~has, tensor.bytes))
        if instance.client in tensor.destinations:
            to_client.append((has, ~has, tensor.bytes))
    return [_summed(terms, len(members)) for terms in (received, sent, from_client, to_client)]


def _summed(terms: Sequence[_Term], positions: int) -> Transfers:
    if not terms:
        return Transfers(np.zeros((positions, positions)), np.zeros((positions, positions)))
    ends, begins = (np.array([term[side] for term in terms], dtype=np.float64) for side in (0, 1))
    sizes = np.array([term[2] for term in terms])
    return Transfers((ends.T * sizes) @ begins, ends.T @ begins)


def _adjacent_transfers(instance: Instance, members: Floats) -> Transfers:
    """Return (1, P) transfers that certainly pass from the stage that ends at an ideal to the next one.

    If all other pieces of the ideal lie before one of its pieces, the stage that ends there has that piece. The next
    stage has a piece that needs no other piece outside of the ideal.
    """
    length = members.shape[1]
    bytes_, tensors = np.zeros((length, length)), np.zeros((length, length))
    for tensor in instance.tensors:
        ends = [piece for piece in tensor.destinations if instance.client not in (piece, tensor.source)]
        bytes_[tensor.source, ends] += tensor.bytes
        tensors[tensor.source, ends] += 1.0
    edges = (tensors > 0).astype(np.float64)
    last = (members > 0) & (members @ edges.T == 0)
    first = (members == 0) & ((1.0 - members) @ edges == 0)
    adjacent = Transfers(np.zeros((1, len(members))), np.zeros((1, len(members))))
    for place in np.flatnonzero((last.sum(axis=1) == 1) & first.any(axis=1)):
        pair = int(last[place].argmax()), first[place]
        adjacent.bytes[0, place], adjacent.tensors[0, place] = bytes_[pair].min(), tensors[pair].min()
    return adjacent


def _best_link(instance: Instance, machines: Sequence[int], incoming: bool) -> tuple[float, float]:
    """Return seconds per byte and latency of each machine's best link; the slowest machine counts.

    Infinite if one of the machines has no link.
    """
    best = []
    for machine in machines:
        rows = (slice(None, -1), machine) if incoming else (machine, slice(None, -1))
        linked = instance.linked[rows]
        tables = (instance.seconds_per_byte, instance.latency)
        best.append([float(table[rows][linked].min(initial=math.inf)) for table in tables])
    return max(slow for slow, _ in best), max(lag for _, lag in best)


def _difference(values: Floats) -> Floats:
    difference = np.asarray(values[:, None] - values[None, :], dtype=np.float64)
    difference[np.abs(difference) < ROUNDING * np.abs(values).max(initial=0.0)] = 0.0
    return difference


def _largest(values: Floats, ideals: Flags) -> Floats:
    largest = np.zeros((len(ideals), len(ideals)))
    for piece in np.argsort(values):
        if values[piece] > 0:
            has = ideals[:, piece]
            largest[np.ix_(has, ~has)] = values[piece]
    return largest


def shared_seconds(members: list[tuple[Floats, int]]) -> Floats:
    """Return the seconds per micro-batch of machines that share a stage: one over the sum of their rates.

    ``members`` are seconds and number of machines. Infinite if any of them cannot hold the stage.
    """
    if len(members) == 1 and members[0][1] == 1:
        return members[0][0].copy()
    with np.errstate(divide="ignore"):
        together: Floats = 1.0 / np.sum([count / seconds for seconds, count in members], axis=0)
    together[np.logical_or.reduce([np.isinf(seconds) for seconds, _ in members])] = math.inf
    return together
