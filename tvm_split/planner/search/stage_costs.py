"""Costs of every stage between two ideals on each group of machines, as matrices over the two ends of the stage.

The costs of a chain are exact: its ideals are its prefixes. In other graphs, the transfers of a stage also depend on
stages that are not adjacent. There the costs assume the machine's best link, and that each tensor is sent once. Only
after a piece that divides the graph, the next stage certainly receives a tensor of it from the previous stage. So the
value of the best sequence is a lower bound. It is the value of its plan if links are equal and no tensor goes to two
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
"""Relative size, to the sums, below which a difference of two sums counts as 0."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of stages between P ideals; the first ideal is empty and the last has all pieces.

    Attributes:
        period, latency: for each group a (P, P) matrix of seconds; row: the stage's end, column: its begin. Covers
            compute and transfers, except those that certainly pass between adjacent stages. Infinite if there is no
            such stage or the group cannot hold it.
        crossing_bytes: (P,) bytes that certainly pass, over the link of their groups, from the stage that ends at an
            ideal to the next one.
        crosses: (P,) 1 if any tensor certainly passes there, even of 0 bytes, else 0.
        memory: (P, P) bytes that each stage takes.
        computed: for each class of machines a (P, P) matrix of compute seconds of one machine, transfers included.
        load: for each group a (P, P) matrix of any value that is summed over stages.
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
    """Return stage costs that are never above the true ones if ``optimistic``; else assume the slowest links."""
    members = ideals.members.astype(np.float64)
    sizes = members.sum(axis=1)
    # Row: a stage's end, column: its begin. The smaller ideal must be inside the larger one.
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
    """Bytes and number of transferred tensors: (P, P) by end and begin of a stage, or (1, P) by its begin."""

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


def _traffic(instance: Instance, ideals: Ideals) -> list[_Transfers]:
    """Return transfers of stages: received, sent, from the client and to the client, if each tensor is sent once."""
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
        # A stage needs the tensor if its end has more of the tensor's readers than its begin.
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
    """Return (1, P) transfers that certainly pass from the stage that ends at an ideal to the next one.

    All pieces after a dividing piece depend on it. The next stage holds a piece that needs no other piece after it.
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
    """Return seconds per byte and latency of each machine's best or worst link; the slowest machine counts.

    Infinite if one of the machines has no link.
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
    """Return the seconds per micro-batch of machines that share a stage: one over the sum of their rates.

    ``members`` are seconds and number of machines. Infinite if any of them cannot hold the stage.
    """
    if len(members) == 1 and members[0][1] == 1:
        return members[0][0].copy()
    with np.errstate(divide="ignore"):
        together: Floats = 1.0 / np.sum([count / seconds for seconds, count in members], axis=0)
    together[np.logical_or.reduce([np.isinf(seconds) for seconds, _ in members])] = math.inf
    return together
