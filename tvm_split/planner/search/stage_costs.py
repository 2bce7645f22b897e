"""What each group of machines would need for every stage between two ideals, as matrices over its two ends.

A chain is the graph whose ideals are its prefixes: its costs are exact. What a stage exchanges in another graph depends
on where other stages are, beyond its neighbours. The costs here take the best link a machine has, and a tensor as sent
once; only behind a piece that divides the graph, the next stage surely gets a tensor of it from the stage before. So
the value of the best sequence is a lower bound, and that of its plan wherever links are equal and no tensor goes to two
stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_split.planner.search.ideals import Ideals, dividing_pieces, predecessors
from tvm_split.planner.search.instance import Flags, Floats, Instance
from tvm_split.planner.search.machine_classes import Groups

ROUNDING = 1e-14
"""Share of a sum below which a difference of two such sums is 0."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of stages between P ideals, of which the first is before all pieces and the last behind them.

    Attributes:
        period, latency: for each group a (P, P) matrix, row where the stage ends, column where it begins; what the
            group computes and exchanges, but for what surely passes between neighbours. Infinite where it is no stage
            or the group cannot hold it.
        crossing_bytes: (P,) what surely passes from the stage before an ideal's end to the one behind it, over the link
            of their groups.
        crosses: (P,) whether anything passes there, if only 0 bytes.
        memory: (P, P) bytes that each stage takes.
        computed: for each class of machines a (P, P) matrix of what one computes for a stage, transfers included.
        load: for each group a (P, P) matrix of anything whose sum over stages is asked for.
    """

    groups: Groups
    period: tuple[Floats, ...]
    latency: tuple[Floats, ...]
    crossing_bytes: Floats
    crosses: Floats
    memory: Floats
    computed: tuple[Floats, ...]
    load: tuple[Floats, ...] = ()


def stage_costs(instance: Instance, groups: Groups, ideals: Ideals, *, optimistic: bool = True) -> StageCosts:
    """Costs that are never above the true ones if ``optimistic``, else those of the slowest links."""
    members = ideals.members.astype(np.float64)
    sizes = members.sum(axis=1)
    # Row where a stage ends, column where it begins: the smaller ideal must be inside the larger one.
    inside = (members @ members.T == sizes[None, :]) & (sizes[:, None] > sizes[None, :])
    received, sent, from_client, to_client = _traffic(instance, ideals)
    exchanged = received.bytes + sent.bytes + from_client.bytes + to_client.bytes
    tensors = received.tensors + sent.tensors + from_client.tensors + to_client.tensors
    weights = _difference(members @ instance.weights)
    memory = weights + _largest(instance.activations, ideals) + instance.problem.buffers * exchanged
    alone, full = [], []
    for machine in (members_of_class[0] for members_of_class in groups.classes):
        allowed = np.isfinite(instance.seconds[:, machine])
        seconds = _difference(members @ np.where(allowed, instance.seconds[:, machine], 0.0))
        possible = inside & (_difference(members @ ~allowed) == 0) & (memory <= instance.memory[machine] * (1 + 1e-9))
        compute = seconds * instance.contention[machine] + tensors * instance.transfer_seconds[machine]
        compute += exchanged * instance.transfer_seconds_per_byte[machine]
        alone.append(np.where(possible, seconds, math.inf))
        full.append(np.where(possible, compute, math.inf))
    sure = _sure_transfers(instance, ideals)
    other = _Transfers(np.maximum(received.bytes - sure.bytes, 0.0), received.tensors - sure.tensors)
    period, latency = [], []
    for number, group in enumerate(groups.counts):
        kinds = [kind for kind, count in enumerate(group) if count]
        ends = [groups.classes[kind][0] for kind in kinds]
        into, outof = (_link(instance, ends, incoming, optimistic) for incoming in (True, False))
        home_in, home_out = (
            (float(groups.seconds_per_byte[ends]), float(groups.latency[ends])) for ends in ((-1, number), (number, -1))
        )
        receive = received.stream_seconds(into) + from_client.stream_seconds(home_in)
        send = sent.stream_seconds(outof) + to_client.stream_seconds(home_out)
        compute = _shared([(full[kind], group[kind]) for kind in kinds])
        period.append(np.maximum(np.maximum(compute, receive), send))
        slowest = np.maximum.reduce([alone[kind] for kind in kinds])
        transfers = other.seconds(into) + from_client.seconds(home_in) + to_client.seconds(home_out)
        latency.append(slowest + transfers)
    crosses = (sure.tensors > 0).astype(float)[0]
    return StageCosts(groups, tuple(period), tuple(latency), sure.bytes[0], crosses, memory, tuple(full))


@dataclass(frozen=True)
class _Transfers:
    """(P, P), or (1, P) of where a stage begins: bytes and number of the tensors that pass."""

    bytes: Floats
    tensors: Floats

    def stream_seconds(self, link: tuple[float, float]) -> Floats:
        """Over a link of so many seconds per byte and of that latency, infinite if there is none."""
        if math.isinf(link[1]):
            return np.where(self.tensors > 0, math.inf, 0.0)
        return self.bytes * link[0]

    def seconds(self, link: tuple[float, float]) -> Floats:
        """Of a single micro-batch."""
        return self.stream_seconds(link) + np.where(self.tensors > 0, link[1], 0.0)


_Term = tuple[Flags, Flags, float]
"""Bytes that a stage exchanges if the first is true of where it ends and the second of where it begins."""


def _traffic(instance: Instance, ideals: Ideals) -> list[_Transfers]:
    """What stages receive and send, and get from the client and send to it, if each tensor is sent once."""
    members = ideals.members
    received: list[_Term] = []
    sent: list[_Term] = []
    from_client: list[_Term] = []
    to_client: list[_Term] = []
    for tensor in instance.tensors:
        ends = [piece for piece in tensor.destinations if piece != instance.client]
        reached = members[:, ends].sum(axis=1)
        is_input = tensor.source == instance.client
        has = np.ones(len(members), dtype=bool) if is_input else members[:, tensor.source]
        # A stage needs the tensor if it ends with more of its readers than it begins with.
        into = from_client if is_input else received
        into += [(reached > count, has & (reached == count), tensor.bytes) for count in range(len(ends))]
        if not is_input:
            sent.append((has & (reached < len(ends)), ~has, tensor.bytes))
        if instance.client in tensor.destinations:
            to_client.append((has, ~has, tensor.bytes))
    return [_summed(terms, len(members)) for terms in (received, sent, from_client, to_client)]


def _summed(terms: Sequence[_Term], positions: int) -> _Transfers:
    if not terms:
        return _Transfers(np.zeros((positions, positions)), np.zeros((positions, positions)))
    ends, begins = (np.array([term[side] for term in terms], dtype=np.float64) for side in (0, 1))
    sizes = np.array([term[2] for term in terms])
    return _Transfers((ends.T * sizes) @ begins, ends.T @ begins)


def _sure_transfers(instance: Instance, ideals: Ideals) -> _Transfers:
    """(1, P) what passes from the stage before an ideal's end to the next one, whatever they are.

    All pieces behind a dividing one depend on it, and the next stage has one of those that need no other.
    """
    before = predecessors(instance)
    counts = ideals.members.sum(axis=1)
    found = _Transfers(np.zeros((1, len(counts))), np.zeros((1, len(counts))))
    sizes: dict[tuple[int, int], list[float]] = {}
    for tensor in instance.tensors:
        for end in tensor.destinations:
            sizes.setdefault((tensor.source, end), []).append(tensor.bytes)
    for piece in dividing_pieces(instance):
        following = [other for other in range(piece + 1, len(before)) if piece in before[other]]
        first = [sizes[piece, other] for other in following if max(before[other]) == piece]
        at = np.flatnonzero(ideals.members[:, piece] & (counts == piece + 1))
        if first:
            found.bytes[0, at] = min(map(math.fsum, first))
            found.tensors[0, at] = min(map(len, first))
    return found


def _link(instance: Instance, machines: Sequence[int], incoming: bool, optimistic: bool) -> tuple[float, float]:
    """Seconds per byte and latency of the best or worst link of machines, of which the slowest counts.

    Infinite if one of them has no link.
    """
    pick = np.min if optimistic else np.max
    speeds, latencies = [], []
    for machine in machines:
        rows = (slice(None, -1), machine) if incoming else (machine, slice(None, -1))
        linked = instance.linked[rows]
        if not linked.any():
            return math.inf, math.inf
        speeds.append(float(pick(instance.seconds_per_byte[rows][linked])))
        latencies.append(float(pick(instance.latency[rows][linked])))
    return max(speeds), max(latencies)


def _difference(values: Floats) -> Floats:
    found = np.asarray(values[:, None] - values[None, :], dtype=np.float64)
    found[np.abs(found) < ROUNDING * np.abs(values).max(initial=0.0)] = 0.0
    return found


def _largest(values: Floats, ideals: Ideals) -> Floats:
    members = ideals.members
    found = np.zeros((len(members), len(members)))
    for piece in np.argsort(values):
        if values[piece] > 0:
            has = members[:, piece]
            found[np.ix_(has, ~has)] = values[piece]
    return found


def _shared(members: list[tuple[Floats, int]]) -> Floats:
    """What so many machines of each duration take together: one over the sum of their rates.

    Infinite where any of them cannot hold the stage.
    """
    if len(members) == 1 and members[0][1] == 1:
        return members[0][0].copy()
    with np.errstate(divide="ignore"):
        together: Floats = 1.0 / np.sum([count / seconds for seconds, count in members], axis=0)
    together[np.logical_or.reduce([np.isinf(seconds) for seconds, _ in members])] = math.inf
    return together
