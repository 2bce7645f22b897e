"""Mixed-integer linear programs, built row by row and solved with HiGHS."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np

from tvm_split.planner.search.budget import Budget

NODE_WORK = 4000
"""Units of work of one node of the branch-and-bound tree, per row."""
MOST_NODES = 2**31 - 1
FEASIBILITY = 1e-7
"""Largest violation of a row that HiGHS accepts, for numbers scaled to about 1."""


@dataclass
class LinearProgram:
    """A linear program that minimises the sum of costs; columns are numbered in the order they are added."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, upper: float = math.inf, *, lower: float = 0.0, cost: float = 0.0, integer: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        self.integers.append(integer)
        return len(self.lower) - 1

    def binary(self) -> int:
        return self.column(1.0, integer=True)

    def at_most(self, terms: Iterable[tuple[int, float]], limit: float) -> None:
        self.rows.append((_summed(terms), -math.inf, limit))

    def equal(self, terms: Iterable[tuple[int, float]], value: float) -> None:
        self.rows.append((_summed(terms), value, value))

    def solve(self, budget: Budget, relative_gap: float, start: Mapping[int, float]) -> LinearSolution:
        """Return the best solution that HiGHS finds on one thread within a budget.

        Args:
            budget: a limit of work alone limits the nodes of the tree.
            relative_gap: HiGHS stops at this relative optimality gap.
            start: values of all integer columns of a known solution, or empty.
        """
        nodes = budget.work_left / (NODE_WORK * max(1, len(self.rows)))
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("time_limit", max(budget.seconds_left, 0.01)),
            ("mip_max_nodes", MOST_NODES if math.isfinite(budget.seconds_left) else int(min(nodes, MOST_NODES))),
            ("mip_rel_gap", relative_gap),
            ("mip_abs_gap", 0.0),
            ("mip_feasibility_tolerance", FEASIBILITY),
        ):
            solver.setOptionValue(option, value)
        solver.passModel(self._model())
        if start:
            columns = np.array(list(start), dtype=np.int32)
            solver.setSolution(len(start), columns, np.array(list(start.values()), dtype=np.float64))
        solver.run()
        info = solver.getInfo()
        is_mixed = any(self.integers)
        bound = info.mip_dual_bound if is_mixed else info.objective_function_value
        status = solver.getModelStatus()
        optimal = status == highspy.HighsModelStatus.kOptimal
        has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return LinearSolution(
            values=np.array(solver.getSolution().col_value) if has_values else None,
            bound=float(bound) if (is_mixed or optimal) and math.isfinite(bound) else -math.inf,
            infeasible=status == highspy.HighsModelStatus.kInfeasible,
        )

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.lower), len(self.rows)
        model.col_lower_, model.col_upper_ = np.array(self.lower), np.array(self.upper)
        model.col_cost_ = np.array(self.cost)
        model.row_lower_ = np.array([lower for _, lower, _ in self.rows])
        model.row_upper_ = np.array([upper for _, _, upper in self.rows])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row) for row, _, _ in self.rows])]).astype(
            np.int32
        )
        model.a_matrix_.index_ = np.array([column for row, _, _ in self.rows for column in row], dtype=np.int32)
        model.a_matrix_.value_ = np.array([value for row, _, _ in self.rows for value in row.values()])
        if any(self.integers):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[each] for each in self.integers]
        return model


@dataclass(frozen=True)
class LinearSolution:
    """A solution: ``values`` of its columns, None if none was found, and ``bound``, a lower bound on the cost."""

    values: np.ndarray[tuple[int], np.dtype[np.float64]] | None
    bound: float
    infeasible: bool


def _summed(terms: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for column, value in terms:
        found[column] = found.get(column, 0.0) + value
    return {column: value for column, value in found.items() if value != 0.0}
