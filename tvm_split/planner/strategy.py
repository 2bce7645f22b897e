"""Strategies that search for a plan (built in, or from entry points `tvm_split.strategies`), and faults of problems."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from rpc_runtime.program.routes import CLIENT
from rpc_runtime.registry import Registry
from tvm_split.errors import PlanError
from tvm_split.planner.evaluate import evaluate, violations
from tvm_split.planner.problem import Problem, Solution, Stage, gap_of, objective_seconds
from tvm_split.planner.step_graph import lower
from tvm_split.units import short_list
from tvm_split.values import Location

Fault = tuple[Location, str]
"""The location of an error in a problem, such as ``("links", 2, "from")`` in its file, and what is wrong."""


def require_valid(problem: Problem) -> None:
    """Raise a `PlanError` for the first error in a problem, if there is one."""
    for _, text in faults(problem):
        raise PlanError(text)


def faults(problem: Problem) -> Iterator[Fault]:
    """The errors in a problem: names that are unknown or repeated, and impossible counts. Types check the ranges.

    A repeated message is yielded once. If machine or piece names are wrong, references to them are not checked.
    """
    reported: set[str] = set()
    for where, text in _all_faults(problem):
        if text not in reported:
            reported.add(text)
            yield where, text


def _all_faults(problem: Problem) -> Iterator[Fault]:
    machines, pieces = [machine.name for machine in problem.machines], [piece.name for piece in problem.pieces]
    wrong_machines, wrong_pieces = list(_name_faults("machine", machines)), list(_name_faults("piece", pieces))
    yield from (*wrong_machines, *wrong_pieces)
    known_machines = None if wrong_machines else set(machines)
    known_pieces = None if wrong_pieces else set(pieces)
    ends = known_machines and {*known_machines, CLIENT}
    yield from _link_faults(problem, ends)
    for index, piece in enumerate(problem.pieces):
        if known_machines is not None and not piece.seconds.keys() <= known_machines:
            for name in piece.seconds:
                yield from _unknown("machine", name, known_machines, ("pieces", index, "seconds", name))
    yield from _edge_faults(problem, known_pieces and {*known_pieces, CLIENT})
    for index, pin in enumerate(problem.pins):
        yield from _unknown("piece", pin.piece, known_pieces, ("pins", index, "piece"))
        where = ("pins", index, "not_on" if pin.forbidden else "on")
        yield from _unknown("machine", pin.machine, known_machines, where)
    for index, shared in enumerate(problem.shared_cores):
        for place, name in enumerate(shared.machines):
            where_shared = ("shared_cores", index, "machines", place)
            yield from _unknown("machine", name, ends, where_shared)
            if name in shared.machines[:place]:
                yield where_shared, f"shared cores name {name!r} twice; give it once"
    if not wrong_machines and not wrong_pieces:
        yield from _count_faults(problem)


def _name_faults(kind: str, names: Sequence[str]) -> Iterator[Fault]:
    if not names:
        yield (f"{kind}s",), f"there are no {kind}s; name at least one"
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        where = (f"{kind}s", index, "name")
        if not name:
            yield where, f"a {kind} has no name"
        elif name == CLIENT:
            yield where, f"a {kind} cannot be named {CLIENT!r}, which stands for the caller"
        elif first.setdefault(name, index) != index:
            yield where, f"two {kind}s are named {name!r}; names must be distinct"


def _link_faults(problem: Problem, names: set[str] | None) -> Iterator[Fault]:
    ends: set[tuple[str, str]] = set()
    for index, link in enumerate(problem.links):  # there may be a million: one quick test for the usual case
        pair = link.source, link.destination
        is_known = names is None or (pair[0] in names and pair[1] in names)
        if not is_known:
            yield from _unknown("machine", link.source, names, ("links", index, "from"))
            yield from _unknown("machine", link.destination, names, ("links", index, "to"))
        elif pair[0] == pair[1]:
            yield ("links", index, "to"), f"link from {pair[0]!r} to {pair[1]!r} goes to itself"
        elif pair in ends:
            yield ("links", index), f"link from {pair[0]!r} to {pair[1]!r} is there twice; give it once"
        ends.add(pair)


def _edge_faults(problem: Problem, names: set[str] | None) -> Iterator[Fault]:
    bytes_of: dict[tuple[str, str], float] = {}
    for index, edge in enumerate(problem.edges):
        yield from _unknown("piece", edge.source, names, ("edges", index, "from"))
        yield from _unknown("piece", edge.destination, names, ("edges", index, "to"))
        what = f"edge from {edge.source!r} to {edge.destination!r}"
        if edge.source == edge.destination:
            yield ("edges", index, "to"), f"{what} goes to itself"
        if edge.tensor is not None and bytes_of.setdefault((edge.source, edge.tensor), edge.bytes) != edge.bytes:
            before = bytes_of[edge.source, edge.tensor]
            text = f"{what}: tensor {edge.tensor!r} has {edge.bytes!r} bytes here and {before!r} on an edge before"
            yield ("edges", index, "bytes"), text


def _count_faults(problem: Problem) -> Iterator[Fault]:
    limits = [
        (len(problem.machines), f"there are {len(problem.machines)} machines, and each holds one stage"),
        (len(problem.pieces), f"there are {len(problem.pieces)} pieces, and a stage holds at least one"),
    ]
    if (most := problem.maximum_machines) is not None:
        limits.append((most, f"at most {most} machines may be used, and each holds one stage"))
    limit, text = min(limits)
    if problem.stages is not None and problem.stages > limit:
        yield ("stages",), f"{problem.stages} stages were asked for, but {text}; ask for fewer"


def _unknown(kind: str, name: str, names: set[str] | None, where: Location) -> Iterator[Fault]:
    """Yield the error of a name that is not among ``names``; these are None if they are wrong themselves."""
    if names is not None and name not in names:
        yield where, f"no {kind} is named {name!r}; there are {short_list(sorted(names - {CLIENT}), 8)}"


class Strategy(ABC):
    """A way to place pieces on machines; a package registers a subclass."""

    name: ClassVar[str]

    @abstractmethod
    def solve(self, problem: Problem, time_limit_seconds: float) -> Solution:
        """The plan to use, with a lower bound if one is known: see `solution_of`.

        Raises:
            NoPlanError: no plan fits; says why.
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
        NoPlanError: the strategy says that no plan fits.
        PlanError: there is no such strategy, or the strategy's plan breaks a demand.
    """
    require_valid(problem)
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
