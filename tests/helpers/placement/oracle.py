"""A slow, independent implementation of the planner's formulas, and an exhaustive search of small problems."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from tvm_split.placement.problem import Problem
from tvm_split.placement.search import Budget
from tvm_split.placement.search.instance import instance_of
from tvm_split.placement.search.search import RESOLVED, Search

Assignment = list[tuple[tuple[str, ...], list[str]]]
"""Stages as (machines, pieces)."""


def judge(problem: Problem, stages: Assignment) -> tuple[float, float] | None:
    """The period and the latency of a plan; None if the plan is not allowed."""
    machines = {machine.name: machine for machine in problem.machines}
    links = {(link.source, link.destination): link for link in problem.links}
    pieces = {piece.name: piece for piece in problem.pieces}
    home = {name: index for index, (_, names) in enumerate(stages) for name in names}
    used = [machine for group, _ in stages for machine in group]
    if len(set(used)) < len(used) or len(used) > (problem.maximum_machines or len(used)):
        return None
    if problem.stages is not None and len(stages) != problem.stages:
        return None
    for pin in problem.pins:
        on = stages[home[pin.piece]][0]
        if (pin.machine in on) if pin.forbidden else any(machine != pin.machine for machine in on):
            return None
    moved: dict[tuple[int | str, int | str], list[float]] = {}
    once: set[tuple[str, str, int | str]] = set()
    for edge in problem.edges:
        source, end = home.get(edge.source, "client"), home.get(edge.destination, "client")
        if source == end:
            continue
        if edge.tensor is not None:
            if (edge.source, edge.tensor, end) in once:
                continue
            once.add((edge.source, edge.tensor, end))
        moved.setdefault((source, end), []).append(edge.bytes)

    def members(stage: int | str) -> tuple[str, ...]:
        return ("client",) if stage == "client" else stages[int(stage)][0]

    stream: dict[tuple[int | str, int | str], float] = {}
    single: dict[tuple[int | str, int | str], float] = {}
    for (source, end), sizes in moved.items():
        route_links = [links.get(pair) for pair in itertools.product(members(source), members(end))]
        if None in route_links:
            return None
        stream[source, end] = sum(sizes) / min(link.bytes_per_second for link in route_links if link)
        single[source, end] = max(link.latency_seconds for link in route_links if link) + stream[source, end]
    periods = []
    busy: dict[str, float] = {}
    for index, (group, names) in enumerate(stages):
        sizes = [size for pair, moved_sizes in moved.items() if index in pair for size in moved_sizes]
        rate = 0.0
        for machine in group:
            if any(machine not in pieces[name].seconds for name in names):
                return None
            needed = sum(pieces[name].weight_bytes for name in names) + problem.buffers * sum(sizes)
            if needed + max(pieces[name].activation_bytes for name in names) > machines[machine].memory_bytes:
                return None
            seconds = sum(pieces[name].seconds[machine] for name in names)
            seconds *= machines[machine].contention if len(used) > 1 else 1
            seconds += sum(
                machines[machine].transfer_seconds + size * machines[machine].transfer_seconds_per_byte
                for size in sizes
            )
            rate += 1 / seconds if seconds else math.inf
        periods.append(1 / rate)
        busy |= {machine: machines[machine].cores / rate for machine in group}  # each replica, since they alternate
        periods.append(sum(seconds for (_, end), seconds in stream.items() if end == index))
        periods.append(sum(seconds for (source, _), seconds in stream.items() if source == index))
    at_home = [size for pair, moved_sizes in moved.items() if "client" in pair for size in moved_sizes]
    busy["client"] = sum(
        problem.client_transfer_seconds + size * problem.client_transfer_seconds_per_byte for size in at_home
    )
    for shared in problem.shared_cores:
        periods.append(sum(busy.get(name, 0.0) for name in shared.machines) / shared.cores)
    finish: dict[int | str, float] = {"client": 0.0}
    waiting = list(range(len(stages)))
    while waiting:
        ready = [i for i in waiting if all(s in finish for s, end in single if end == i)]
        if not ready:
            return None
        for index in ready:
            start = max((finish[s] + seconds for (s, end), seconds in single.items() if end == index), default=0.0)
            group, names = stages[index]
            finish[index] = start + max(sum(pieces[name].seconds[m] for name in names) for m in group)
            waiting.remove(index)
    arrivals = [finish[source] + seconds for (source, end), seconds in single.items() if end == "client"]
    period, latency = max(periods), max([*finish.values(), *arrivals])
    return period, latency


def chain_plans(problem: Problem) -> Iterator[Assignment]:
    """All plans of a chain: all cuts with all ordered choices of machines, or of disjoint sets of replicas."""
    names = [piece.name for piece in problem.pieces]
    machines = [machine.name for machine in problem.machines]
    subsets = [
        group
        for size in range(1, len(machines) + 1 if problem.replicas else 2)
        for group in itertools.combinations(machines, size)
    ]
    for count in range(1, min(len(names), len(machines)) + 1):
        for cuts in itertools.combinations(range(1, len(names)), count - 1):
            segments = [names[start:end] for start, end in itertools.pairwise((0, *cuts, len(names)))]
            for groups in itertools.permutations(subsets, count):
                if sum(map(len, groups)) == len(set().union(*groups)):
                    yield list(zip(groups, segments, strict=True))


def graph_plans(problem: Problem) -> Iterator[Assignment]:
    """All plans of a graph: every piece on every machine or, with replicas, on every disjoint set of machines."""
    machines = [machine.name for machine in problem.machines]
    for groups in _disjoint_sets(machines) if problem.replicas else [[(machine,) for machine in machines]]:
        for choice in itertools.product(groups, repeat=len(problem.pieces)):
            if problem.replicas and len(set(choice)) < len(groups):
                continue  # the same plan as with fewer sets
            stages: dict[tuple[str, ...], list[str]] = {}
            for piece, group in zip(problem.pieces, choice, strict=True):
                stages.setdefault(group, []).append(piece.name)
            yield list(stages.items())


def _disjoint_sets(machines: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """All ways to form disjoint sets of some of the machines; the order does not matter."""
    if not machines:
        yield []
        return
    first, *rest = machines
    for groups in _disjoint_sets(rest):
        yield groups
        yield [(first,), *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], (first, *group), *groups[place + 1 :]]


def best(problem: Problem, plans: Iterator[Assignment]) -> tuple[float, float] | None:
    """The best value of the objective, and the least other value among plans with it; None if no plan is allowed."""
    values = []
    for plan in plans:
        judged = judge(problem, plan)
        if judged is None:
            continue
        period, latency = judged
        if period <= problem.maximum_period_seconds * (1 + 1e-9) and (
            latency <= problem.maximum_latency_seconds * (1 + 1e-9)
        ):
            values.append((period, latency) if problem.objective == "throughput" else (latency, period))
    if not values:
        return None
    least = min(value for value, _ in values)
    return least, min(secondary for value, secondary in values if value <= least * (1 + 1e-9))


WORK = 4.0e8
"""The work limit of a search: enough for every problem that is also searched exhaustively."""


def best_of_any_shares(problem: Problem) -> Search | None:
    """The result for shares of any size, for which tables are exact; None if a piece can run nowhere."""
    instance = instance_of(problem)
    if np.isinf(instance.seconds).all(axis=1).any():
        return None
    return Search(instance, Budget(work=WORK)).run()


def assert_is_best(problem: Problem, expected: tuple[float, float] | None, *, is_exact: bool = True) -> None:
    """Check the plan's value and evaluation; if exact, also that no gap is left and ties are decided."""
    result = best_of_any_shares(problem)
    if result is None or result.chosen is None or expected is None:
        assert expected is None
        assert result is None or result.chosen is None
        return
    stages, flow = result.chosen.named(instance_of(problem)), result.chosen.flow
    values = flow.period_seconds, flow.latency_seconds
    judged = judge(problem, [(stage.machines, list(stage.layers)) for stage in stages])
    assert judged == pytest.approx(values, rel=1e-9, abs=1e-15)
    if problem.objective == "latency":
        values = values[::-1]
    assert result.lower_bound_seconds <= expected[0] * (1 + 1e-8) + 1e-15
    if is_exact:
        assert values == pytest.approx(expected, rel=2e-9, abs=1e-15)
        assert result.lower_bound_seconds == values[0]
    else:
        assert values[0] <= expected[0] * (1 + RESOLVED) + 1e-12
