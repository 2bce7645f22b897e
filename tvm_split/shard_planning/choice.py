"""Choose between the best plan of whole layers and plans with sharded stages, with a lower bound and the reasons."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tvm_split.cluster.cluster import Workers
from tvm_split.errors import NoPlanError, PlanError
from tvm_split.link_codecs import PredictCoded
from tvm_split.planner.baselines import MARGIN
from tvm_split.planner.predict import Certificate, predict
from tvm_split.planner.prediction import ComparedPlan, Prediction
from tvm_split.planner.problem import Problem, Stage, Timed, gap_of, objective_seconds
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.search.bounds import division_bound
from tvm_split.progress import StepProgress
from tvm_split.shard_planning.attempts import Attempts
from tvm_split.shard_planning.candidates import ShardCandidates, ShardPlan
from tvm_split.units import names_of, seconds_text

DIVIDED = "every piece divided over the machines at will, with nothing exchanged"
"""The relaxed plan that gives the lower bound if layers may be sharded."""
MOST_TIMED = 3
"""Most candidates that are measured."""
WORTH_TIMING = 1.25
"""Largest estimate, by the value to beat, of a plan that is measured: parts often take less than estimated."""


@dataclass(frozen=True)
class Choice:
    """The chosen stages with their prediction, and a function that predicts them with codecs."""

    stages: tuple[Stage, ...]
    prediction: Prediction
    predict_coded: PredictCoded

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(machine for stage in self.stages for machine in stage.machines))


class ShardChoice:
    """Considers sharded stages for a problem. Parts are measured on ``cluster``; if it is None, they are estimated."""

    def __init__(
        self,
        candidates: ShardCandidates,
        profile: ClusterProfile,
        problem: Problem,
        cluster: Workers | None,
        on_progress: StepProgress | None,
    ) -> None:
        self._candidates, self._profile, self._problem, self._cluster = candidates, profile, problem, cluster
        self._on_progress = on_progress or (lambda what, done, steps: None)

    def of_stages(self, stages: tuple[Stage, ...], best_bound_seconds: float) -> Choice:
        """Return stages by hand with their prediction; ``best_bound_seconds`` is that of whole layers."""
        bound = min(best_bound_seconds, division_bound(self._problem))
        (plan,) = self._timed((self._candidates.estimated(stages),))
        return self._chosen(plan, Certificate(bound, f"given; the bound is of {DIVIDED}"))

    def keeps_demands(self, stages: tuple[Stage, ...]) -> bool:
        """Whether stages, some of them sharded, satisfy the demands, by estimates."""
        return self._candidates.keeps_demands(self._candidates.estimated(stages))

    def better_of(self, whole: Choice | None, refusal: PlanError | None, deadline: float) -> Choice:
        """Return the better of ``whole``, the best plan of whole layers, and the best plan found with sharded stages.

        The search ends at the ``deadline``, a time of the monotonic clock; no candidate is measured after it if there
        is a plan of whole layers.
        ``whole`` is None if there is no plan of whole layers; then ``refusal`` is raised if no other plan is found.
        """
        value = float("inf") if whole is None else self._value(whole.prediction)
        bound = division_bound(self._problem)
        if whole is not None and bound >= value * (1 - MARGIN):
            return self._of_whole_layers(whole, bound, None)
        self._on_progress("considering splits inside layers", 0, 1)
        candidates = self._candidates.candidates(deadline)
        if whole is None and not candidates and self._candidates.attempts.was_late:
            candidates = self._candidates.candidates(math.inf)
        near: Sequence[ShardPlan] = [
            candidate for candidate in candidates if self._candidates.value(candidate) <= WORTH_TIMING * value
        ][:MOST_TIMED]
        if self._cluster is not None:
            near = [*filter(self._candidates.keeps_demands, self._timed_until(deadline, near, whole is None))]
        best = min(near, key=lambda plan: self._candidates.value(plan), default=None)
        self._on_progress("considering splits inside layers", 1, 1)
        if best is not None and self._candidates.value(best) < value * (1 - MARGIN):
            return self._chosen(best, self._certificate(best, near, whole, bound))
        if whole is None:
            raise refusal or NoPlanError("no plan was found")
        return self._of_whole_layers(whole, bound, best or next(iter(candidates), None))

    def _value(self, timed: Timed) -> float:
        return objective_seconds(self._problem.objective, timed)

    def _timed_until(self, deadline: float, plans: Sequence[ShardPlan], needs_one: bool) -> list[ShardPlan]:
        """Measure plans one after the other until the deadline, at least one of them if there is no other plan."""
        timed: list[ShardPlan] = []
        for plan in plans:
            if time.monotonic() > deadline and not (needs_one and not timed):
                break
            timed += self._timed([plan], self._candidates.attempts)
        return timed

    def _timed(self, plans: Sequence[ShardPlan], attempts: Attempts | None = None) -> Sequence[ShardPlan]:
        if self._cluster is None:
            return plans
        return self._candidates.timed(plans, self._cluster, self._on_progress, attempts)

    def _chosen(self, plan: ShardPlan, certificate: Certificate) -> Choice:
        predicted = partial(predict, self._problem, plan.graph, certificate, self._profile)
        return Choice(plan.stages, predicted(), predicted)

    def _certificate(
        self, best: ShardPlan, timed: Sequence[ShardPlan], whole: Choice | None, bound: float
    ) -> Certificate:
        best_text = f"this one {seconds_text(self._candidates.value(best))}"
        lost = [
            plan.compared(f"takes {seconds_text(self._candidates.value(plan))}, {best_text}")
            for plan in timed
            if plan is not best
        ]
        if whole is not None:
            bound = min(bound, whole.prediction.lower_bound_seconds)
            whole_text = seconds_text(self._value(whole.prediction))
            why = f"the best plan without splits inside layers has {whole_text}, {best_text}"
            first = ComparedPlan.of(f"whole layers on {names_of(whole.machines)}", whole.stages, whole.prediction, why)
            lost = [
                first,
                *lost,
                *(alternative for alternative in whole.prediction.alternatives if alternative.stages != first.stages),
            ]
        how = "estimated" if self._cluster is None else "timed in their own shapes"
        method = f"splits inside layers considered, the best few {how}; the bound is of {DIVIDED}"
        return Certificate(bound, self._noted(method), "", tuple(sorted(lost, key=self._value)))

    def _noted(self, method: str) -> str:
        """The method with what the search for sharded stages left out."""
        return "; ".join([method, *self._candidates.attempts.notes])

    def _of_whole_layers(self, whole: Choice, bound: float, best: ShardPlan | None) -> Choice:
        """Choose the plan of whole layers, and say why no plan with sharded stages is better."""
        prediction, value = whole.prediction, self._value(whole.prediction)
        count = len(whole.machines)
        whole_text = f"{'one machine' if count == 1 else f'{count} machines with whole layers'} {seconds_text(value)}"
        alternatives = prediction.alternatives
        if best is not None:
            best_seconds = self._candidates.value(best)
            pays = "no split inside layers pays" if best_seconds >= value else "a split inside layers gains too little"
            reason = f"{pays}: {whole_text}, best split inside layers {seconds_text(best_seconds)} ({best.words})"
            alternatives = (*alternatives, best.compared(f"takes {seconds_text(best_seconds)}"))
        elif bound >= value * (1 - MARGIN):
            reason = f"no split inside layers can pay: {whole_text}, {DIVIDED} {seconds_text(bound)}"
        else:
            reason = f"no split inside layers was found: {whole_text}"
        lower = min(prediction.lower_bound_seconds, bound)
        among = "" if lower == prediction.lower_bound_seconds else f" among whole layers; the bound is of {DIVIDED}"
        stays = replace(
            prediction,
            lower_bound_seconds=lower,
            gap=gap_of(value, lower),
            method=self._noted(prediction.method + among),
            why_no_more_machines="; ".join(filter(None, [prediction.why_no_more_machines, reason])),
            alternatives=tuple(sorted(alternatives, key=self._value)),
        )
        return replace(whole, prediction=stays)
