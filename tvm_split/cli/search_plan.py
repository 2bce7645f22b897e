"""What ``tvm-split plan`` does without a split: measure, search, compare sizes, improve a plan that has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_split.cli.console import print_json_file, print_note
from tvm_split.cli.search_options import SearchRequest
from tvm_split.cli.wrong_use import WrongUseError
from tvm_split.planner.problem import Objective
from tvm_split.progress import step_progress

if TYPE_CHECKING:
    from tvm_split.cluster.cluster import Cluster
    from tvm_split.model import Model
    from tvm_split.planner.micro_batches import SizedPlan
    from tvm_split.planner.plan import Plan
    from tvm_split.planning import Question


@dataclass(frozen=True)
class Searching:
    """How to get at numbers and how long to search."""

    cluster: Cluster
    objective: Objective
    request: SearchRequest
    measure: bool = True
    refresh: bool = False
    time_limit_seconds: float | None = None
    write_problem: Path | None = None

    def plan(self, model: Model) -> Plan:
        from tvm_split.planner.search import solve
        from tvm_split.planning import answer

        with step_progress("planning") as report:
            question = self._ask(model, report)
            report("searching for the best plan", 1, 1)
            return answer(model, self.cluster, question, solve(question.problem, time_limit_seconds=self._limit))

    def improve(self, model: Model, current: Path, measured: Path, threshold: float) -> Plan:
        """The plan in a file, or the best one by its measurements if that gains enough; says which."""
        from tvm_split.deployment.measured_file import read_measured
        from tvm_split.planner.plan import Plan
        from tvm_split.planning import plan_again

        old, found = Plan.load(current), read_measured(measured, model.name)
        with step_progress("planning") as report:
            question = self._ask(model, report)
            plan, replanned = plan_again(model, self.cluster, question, old, found, threshold, self._limit)
        if replanned.changed and replanned.gain > threshold:
            print_note(f"the plan changes: it gains {replanned.gain:.1%}, more than the threshold of {threshold:.1%}")
        elif replanned.changed:
            print_note(f"the plan changes: the old one does not keep to what is demanded (gain: {replanned.gain:.1%})")
        else:
            print_note(f"the plan stays: another gains {replanned.gain:.1%}, no more than {threshold:.1%}")
        return plan

    def sizes(self, sizes: str, load: Callable[[int], Model]) -> tuple[SizedPlan, ...]:
        """Plans for every micro-batch size in a list with commas, the best first."""
        from tvm_split.planner.micro_batches import plan_sizes

        try:
            wanted = [int(size) for size in sizes.split(",")]
        except ValueError:
            raise WrongUseError(f"{sizes!r} is no list of numbers such as 1,2,4", "--batches") from None
        found = plan_sizes(wanted, load, self.plan, self.request.constraints().maximum_latency_seconds)
        for size in wanted:
            if size not in {each.size for each in found}:
                print_note(f"micro-batches of {size}: no plan keeps to what is demanded")
        return found

    @property
    def _limit(self) -> float:
        from tvm_split.planner.search import DEFAULT_TIME_LIMIT_SECONDS

        return self.time_limit_seconds or DEFAULT_TIME_LIMIT_SECONDS

    def _ask(self, model: Model, report: Callable[[str, int, int], None]) -> Question:
        from tvm_split.planner.problem_file import problem_to_dict
        from tvm_split.planning import ask

        question = ask(
            model,
            self.cluster,
            self.objective,
            self.request.constraints(),
            measure=self.measure,
            refresh=self.refresh,
            on_progress=report,
        )
        if self.write_problem is not None:
            print_json_file(self.write_problem, problem_to_dict(question.problem))
        return question
