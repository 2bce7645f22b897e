"""First fit: fill the fastest machine with pieces up to a period, then the next. Takes milliseconds; has no bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from rpc_runtime.program.routes import CLIENT
from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import violations
from tvm_split.planner.graph import grouped
from tvm_split.planner.problem import Piece, Pin, Problem, Solution, Stage, objective_seconds
from tvm_split.planner.strategy import Strategy, solution_of

HALVINGS = 40
"""Steps of the bisection of the period: it ends at about a trillionth of the longest period."""


class FirstFit(Strategy):
    """Place pieces in topological order on machines in the order of speed, under the least period that fits.

    Transfer times count only when a plan is evaluated. Replicas and a number of stages are not considered.
    """

    name: ClassVar[str] = "first-fit"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        best: Solution | None = None
        reason = "a piece fits no machine by its pins and times"
        for stages in _plans(problem):
            try:
                found = solution_of(problem, stages, method="first fit, without a bound")
            except PlanError as error:
                reason = str(error)
                continue
            broken = violations(problem, stages, found.evaluation)
            if broken:
                reason = "; ".join(broken)
            elif best is None or _value(problem, found) < _value(problem, best):
                best = found
        if best is None:
            raise PlanError(f"first fit finds no plan: {reason}; the strategy 'best' looks further")
        return best


def _value(problem: Problem, solution: Solution) -> float:
    return objective_seconds(problem.objective, solution.evaluation)


def _plans(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """The plans to evaluate: each machine alone, then all machines under the periods of a bisection."""
    pieces = _in_order(problem)
    allowed = {piece.name: _machines_of(problem.pins, piece) for piece in pieces}
    able = [each.name for each in problem.machines if all(each.name in allowed[piece.name] for piece in pieces)]
    yield from ((Stage((name,), tuple(piece.name for piece in pieces)),) for name in able)
    longest = {each.name: sum(piece.seconds.get(each.name, 0.0) for piece in pieces) for each in problem.machines}
    order = sorted(longest, key=lambda name: (name not in able, longest[name]))
    low, high = 0.0, sum(longest.values())
    for _ in range(HALVINGS):
        period = (low + high) / 2
        stages = _filled(problem, pieces, order, allowed, period)
        if stages is None:
            low = period
        else:
            high = period
            yield stages


def _in_order(problem: Problem) -> list[Piece]:
    """The pieces in topological order."""
    before: dict[str, set[str]] = {piece.name: set() for piece in problem.pieces}
    for edge in problem.edges:
        if CLIENT not in (edge.source, edge.destination):
            before[edge.destination].add(edge.source)
    piece_of = {piece.name: piece for piece in problem.pieces}
    return [piece_of[name] for group in grouped(before) for name in group]


def _machines_of(pins: Sequence[Pin], piece: Piece) -> set[str]:
    """The machines on which a piece may be placed."""
    machines = set(piece.seconds)
    for pin in pins:
        if pin.piece == piece.name:
            machines = machines - {pin.machine} if pin.forbidden else machines & {pin.machine}
    return machines


def _filled(
    problem: Problem, pieces: Sequence[Piece], order: Sequence[str], allowed: dict[str, set[str]], period: float
) -> tuple[Stage, ...] | None:
    """Fill each machine with the next pieces that fit its memory and the period; None if pieces are left."""
    machines = {machine.name: machine for machine in problem.machines}
    stages: list[Stage] = []
    first = 0
    for name in order:
        end, seconds, weights = first, 0.0, 0.0
        while end < len(pieces) and name in allowed[pieces[end].name]:
            seconds += pieces[end].seconds[name] * machines[name].contention
            weights += pieces[end].weight_bytes
            if seconds > period or weights + pieces[end].activation_bytes > machines[name].memory_bytes:
                break
            end += 1
        if end > first:
            stages.append(Stage((name,), tuple(piece.name for piece in pieces[first:end])))
        first = end
    return tuple(stages) if first == len(pieces) else None
