"""What each group of machines would need for every stage of a chain, as matrices over its two cuts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tvm_split.planner.search.instance import Floats, Instance
from tvm_split.planner.search.machine_classes import Groups


@dataclass(frozen=True)
class StageCosts:
    """Costs of stages between P positions, of which the first is before all pieces and the last behind them.

    Attributes:
        period, latency: for each group a (P, P) matrix, row where the stage ends, column where it begins; what the
            group computes and exchanges with the client. Infinite where it is no stage or the group cannot hold it.
        crossing_bytes: (P,) what passes from the stage before a position to the one behind it, over the link of their
            groups.
        computed: of chains, for each class of machines a (P, P) matrix of what one computes for a stage, transfers
            included.
        crosses: (P,) whether anything passes there, if only 0 bytes.
        memory: (P, P) bytes that each stage takes.
    """

    groups: Groups
    period: tuple[Floats, ...]
    latency: tuple[Floats, ...]
    crossing_bytes: Floats
    crosses: Floats
    memory: Floats
    computed: tuple[Floats, ...] = ()


def chain_costs(instance: Instance, groups: Groups) -> StageCosts:
    """The exact costs of a chain's stages, for plans of several machines."""
    sizes, counts = crossings_of_chain(instance)
    both_sizes, both_counts = sizes[:, None] + sizes[None, :], counts[:, None] + counts[None, :]
    in_flight = instance.problem.buffers * both_sizes
    memory: Floats = _sums(instance.weights) + _maxima(instance.activations) + in_flight
    alone: list[Floats] = []
    full: list[Floats] = []
    for members in groups.classes:
        machine = members[0]
        seconds = np.where(memory <= instance.memory[machine], _sums(instance.seconds[:, machine]), math.inf)
        transfers = both_counts * instance.transfer_seconds[machine]
        transfers += both_sizes * instance.transfer_seconds_per_byte[machine]
        alone.append(seconds)
        full.append(seconds * instance.contention[machine] + transfers)
    period, latency = [], []
    slow, lag = groups.seconds_per_byte, groups.latency
    for number, group in enumerate(groups.counts):
        stage_period = shared([(full[kind], count) for kind, count in enumerate(group) if count])
        stage_latency = np.maximum.reduce([alone[kind] for kind, count in enumerate(group) if count])
        if counts[0]:
            receive = sizes[0] * slow[-1, number]
            stage_period[:, 0] = np.maximum(stage_period[:, 0], receive)
            stage_latency[:, 0] += receive + lag[-1, number]
        if counts[-1]:
            send = sizes[-1] * slow[number, -1]
            stage_period[-1] = np.maximum(stage_period[-1], send)
            stage_latency[-1] += send + lag[number, -1]
        period.append(stage_period)
        latency.append(stage_latency)
    crosses = (counts > 0).astype(float)
    return StageCosts(groups, tuple(period), tuple(latency), sizes, crosses, memory, tuple(full))


def crossings_of_chain(instance: Instance) -> tuple[Floats, Floats]:
    """Bytes and numbers of tensors at each of the n + 1 cuts of a chain; at its ends those of the client."""
    length = len(instance.pieces)
    sizes, counts = np.zeros(length + 1), np.zeros(length + 1)
    for tensor in instance.tensors:
        cut = 0 if tensor.source == instance.client else tensor.source + 1
        sizes[cut] += tensor.bytes
        counts[cut] += 1
    return sizes, counts


def _sums(values: Floats) -> Floats:
    """(n + 1, n + 1): row j, column k < j is the sum of values k … j − 1, added one by one; else infinite.

    A difference of prefix sums would lose the small values behind a large one.
    """
    length = len(values)
    found = np.full((length + 1, length + 1), math.inf)
    upper = np.cumsum(np.triu(np.broadcast_to(values, (length, length))), axis=1)
    found[1:, :-1] = np.where(np.triu(np.ones((length, length), dtype=bool)), upper, math.inf).T
    return found


def _maxima(values: Floats) -> Floats:
    """As `_sums`, with the largest value instead of the sum."""
    length = len(values)
    found = np.full((length + 1, length + 1), math.inf)
    upper = np.maximum.accumulate(np.triu(np.broadcast_to(values, (length, length))), axis=1)
    found[1:, :-1] = np.where(np.triu(np.ones((length, length), dtype=bool)), upper, math.inf).T
    return found


def shared(members: list[tuple[Floats, int]]) -> Floats:
    """What so many machines of each duration take together: one over the sum of their rates.

    Infinite where any of them cannot hold the stage.
    """
    if len(members) == 1 and members[0][1] == 1:
        return members[0][0].copy()
    with np.errstate(divide="ignore"):
        together: Floats = 1.0 / np.sum([count / seconds for seconds, count in members], axis=0)
    together[np.logical_or.reduce([np.isinf(seconds) for seconds, _ in members])] = math.inf
    return together
