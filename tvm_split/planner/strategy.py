"""Strategies that search for a plan (built in, or from entry points `tvm_split.strategies`), and faults of problems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from rpc_runtime.program.routes import CLIENT
from rpc_runtime.registry import Registry
from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import evaluate, violations
from tvm_split.planner.problem import Problem, Solution, Stage, gap_of, objective_seconds
from tvm_split.planner.step_graph import lower
from tvm_split.units import short_list

Fault = tuple[tuple[int | str, ...], str]
"""The location of an error in a problem, such as ``("links", 2, "from")`` in its file, and what is wrong."""


def require_sense(problem: Problem) -> None:
    """Raise a `PlanError` for the first error in a problem, if there is one."""
    for _, text in faults(problem):
        raise PlanError(text)


def faults(problem: Problem) -> Iterator[Fault]:
    """The errors in a problem: names that are unknown or repeated, and impossible counts. Types check the ranges."""
    machines = [machine.name for machine in problem.machines]
    pieces = [piece.name for piece in problem.pieces]
    for kind, names in (("machine", machines), ("piece", pieces)):
        if not names:
            yield (f"{kind}s",), f"there are no {kind}s; name at least one"
        yield from _doubled(kind, names)
    yield from _link_faults(problem, {*machines, CLIENT})
    yield from _piece_faults(problem, set(machines))
    yield from _edge_faults(problem, {*pieces, CLIENT})
    for index, pin in enumerate(problem.pins):
        yield from _unknown("piece", pin.piece, set(pieces), ("pins", index, "piece"))
        key = "not_on" if pin.forbidden else "on"
        yield from _unknown("machine", pin.machine, set(machines), ("pins", index, key))
    for index, shared in enumerate(problem.shared_cores):
        for place, name in enumerate(shared.machines):
            where = ("shared_cores", index, "machines", place)
            yield from _unknown("machine", name, {*machines, CLIENT}, where)
            if name in shared.machines[:place]:
                yield where, f"{name!r} is there twice; give it once"
    yield from _count_faults(problem)


def _link_faults(problem: Problem, names: set[str]) -> Iterator[Fault]:
    ends: set[tuple[str, str]] = set()
    for index, link in enumerate(problem.links):  # there may be a million: one quick test for the usual case
        pair = link.source, link.destination
        if pair in ends or pair[0] == pair[1] or pair[0] not in names or pair[1] not in names:
            yield from _unknown("machine", link.source, names, ("links", index, "from"))
            yield from _unknown("machine", link.destination, names, ("links", index, "to"))
            what = f"link from {link.source!r} to {link.destination!r}"
            if pair[0] == pair[1]:
                yield ("links", index, "to"), f"{what} goes to itself"
            elif pair in ends:
                yield ("links", index), f"{what} is there twice; give it once"
        ends.add(pair)


def _piece_faults(problem: Problem, machines: set[str]) -> Iterator[Fault]:
    for index, piece in enumerate(problem.pieces):
        if not piece.seconds.keys() <= machines:
            for name in piece.seconds:
                yield from _unknown("machine", name, machines, ("pieces", index, "seconds", name))


def _edge_faults(problem: Problem, names: set[str]) -> Iterator[Fault]:
    bytes_of: dict[tuple[str, str], float] = {}
    for index, edge in enumerate(problem.edges):
        yield from _unknown("piece", edge.source, names, ("edges", index, "from"))
        yield from _unknown("piece", edge.destination, names, ("edges", index, "to"))
        what = f"edge from {edge.source!r} to {edge.destination!r}"
        if edge.source == edge.destination:
            yield ("edges", index, "to"), f"{what} goes to itself"
        if edge.tensor is not None and bytes_of.setdefault((edge.source, edge.tensor), edge.bytes) != edge.bytes:
            before = bytes_of[edge.source, edge.tensor]
            text = f"{what}: tensor {edge.tensor!r} has {edge.bytes:g} bytes here and {before:g} on an edge before"
            yield ("edges", index, "bytes"), text


def _count_faults(problem: Problem) -> Iterator[Fault]:
    stages, most = problem.stages, problem.maximum_machines
    for limit, text in (
        (len(problem.machines), f"there are {len(problem.machines)} machines, and each holds one stage"),
        (len(problem.pieces), f"there are {len(problem.pieces)} pieces, and a stage holds at least one"),
        (most, f"at most {most} machines may be used, and each holds one stage"),
    ):
        if stages is not None and limit is not None and stages > limit:
            yield ("stages",), f"{stages} stages were asked for, but {text}; ask for fewer"


def _doubled(kind: str, names: Sequence[str]) -> Iterator[Fault]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        where = (f"{kind}s", index, "name")
        if not name:
            yield where, f"a {kind} has no name"
        if name == CLIENT:
            yield where, f"a {kind} cannot be named {CLIENT!r}, which stands for the caller"
        if first.setdefault(name, index) != index:
            yield where, f"two {kind}s are named {name!r}; names must be distinct"


def _unknown(kind: str, name: str, names: Iterable[str], where: tuple[int | str, ...]) -> Iterator[Fault]:
    if name not in names:
        yield where, f"no {kind} is named {name!r}; there are {short_list(sorted({*names} - {CLIENT}), 8)}"


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
    {"best": "tvm_split.planner.search.search:Best", "first-fit": "tvm_split.planner.search.simple_plans:FirstFit"},
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
