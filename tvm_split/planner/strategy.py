"""Strategies that search for a plan: built-in ones, and those that packages add (`tvm_split.strategies`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from rpc_runtime.program.routes import CLIENT
from rpc_runtime.registry import Registry
from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import evaluate, violations
from tvm_split.planner.faults import require_sense
from tvm_split.planner.graph import grouped
from tvm_split.planner.problem import Piece, Pin, Problem, Solution, Stage, gap_of, objective_seconds
from tvm_split.planner.step_graph import lower

HALVINGS = 40
"""Steps of the bisection of the period: it ends at about a trillionth of the longest period."""


class Strategy(ABC):
    """A way to place pieces on machines; a package registers a subclass."""

    name: ClassVar[str]

    @abstractmethod
    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        """The plan to use, with a lower bound if one is known: see `solution_of`.

        Raises:
            PlanError: no plan fits; says why.
        """


STRATEGIES: Registry[type[Strategy]] = Registry(
    "tvm_split.strategies",
    "strategy",
    {"best": "tvm_split.planner.search.solve:Best", "first-fit": "tvm_split.planner.strategy:FirstFit"},
    Strategy,
    PlanError,
)


def require_strategy(name: str) -> None:
    """Raise a `PlanError` if there is no strategy of this name, and a `PluginError` if its package is broken."""
    STRATEGIES[name]


def solution_of(
    problem: Problem, stages: Sequence[Stage], lower_bound_seconds: float = 0.0, method: str = ""
) -> Solution:
    """The solution that consists of these stages of pieces; a lower bound of 0 means that none is known.

    Raises:
        PlanError: the stages are no plan for the problem.
    """
    evaluation = evaluate(problem, lower(problem, stages))
    value = objective_seconds(problem.objective, evaluation)
    bound = min(lower_bound_seconds, value)
    return Solution(tuple(stages), evaluation, bound, gap_of(value, bound), method)


def solve_by(strategy: str, problem: Problem, time_limit_seconds: float) -> Solution:
    """The solution of the strategy of this name, evaluated and validated here, so that no strategy misreports its plan.

    A lower bound cannot be validated; the solution's ``method`` says where it comes from.

    Raises:
        PlanError: there is no such strategy, no plan fits, or the strategy's plan breaks a demand.
    """
    require_sense(problem)
    solution = STRATEGIES[strategy]().solve(problem, time_limit_seconds)
    checked = solution_of(problem, solution.stages, solution.lower_bound_seconds)
    broken = violations(problem, solution.stages, checked.evaluation)
    if broken:
        raise PlanError(f"the plan of strategy {strategy!r} cannot be used: {'; '.join(broken)}")
    method = solution.method or f"found by strategy {strategy!r}"
    return replace(
        solution,
        evaluation=checked.evaluation,
        lower_bound_seconds=checked.lower_bound_seconds,
        gap=checked.gap,
        method=method,
    )


class FirstFit(Strategy):
    """First fit: fill the fastest machine with pieces up to a period, then the next. Takes milliseconds; has no bound.

    Pieces are placed in topological order on machines in the order of speed, under the least period that fits.

    Transfer times count only when a plan is evaluated. Replicas and a number of stages are not considered.
    """

    name: ClassVar[str] = "first-fit"

    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        best: Solution | None = None
        reason = "a piece fits no machine by its pins and times"
        for stages in (*_plans_of_one_machine(problem), *first_fit_plans(problem)):
            try:
                solution = solution_of(problem, stages, method="first fit, without a bound")
            except PlanError as error:
                reason = str(error)
                continue
            broken = violations(problem, stages, solution.evaluation)
            if broken:
                reason = "; ".join(broken)
            elif best is None or _value(problem, solution) < _value(problem, best):
                best = solution
        if best is None:
            raise PlanError(f"first fit finds no plan: {reason}; the strategy 'best' looks further")
        return best


def _value(problem: Problem, solution: Solution) -> float:
    return objective_seconds(problem.objective, solution.evaluation)


def _plans_of_one_machine(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    pieces = _in_order(problem)
    names = tuple(piece.name for piece in pieces)
    yield from ((Stage((machine,), names),) for machine in _able(problem, _allowed(problem, pieces)))


def first_fit_plans(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Yield the plans of first fit under the periods of a bisection; transfers and limits do not count."""
    pieces = _in_order(problem)
    allowed = _allowed(problem, pieces)
    able = _able(problem, allowed)
    longest = {
        machine.name: sum(piece.seconds.get(machine.name, 0.0) for piece in pieces) for machine in problem.machines
    }
    order = sorted(longest, key=lambda name: (name not in able, longest[name]))
    low, high = 0.0, sum(longest.values())
    last: tuple[Stage, ...] | None = None
    for _ in range(HALVINGS):
        period = (low + high) / 2
        stages = _filled(problem, pieces, order, allowed, period)
        if stages is None:
            low = period
        else:
            high = period
            if stages != last:
                yield stages
            last = stages


def _able(problem: Problem, allowed: Mapping[str, set[str]]) -> list[str]:
    """The machines on which every piece may be placed."""
    return [machine.name for machine in problem.machines if all(machine.name in names for names in allowed.values())]


def _allowed(problem: Problem, pieces: Sequence[Piece]) -> dict[str, set[str]]:
    return {piece.name: _machines_of(problem.pins, piece) for piece in pieces}


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
