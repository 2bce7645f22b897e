"""Choose between the best plan of whole layers and plans with sharded stages, with a lower bound and the reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from tvm_split.cluster.cluster import Workers
from tvm_split.errors import PlanError
from tvm_split.link_codecs import PredictCoded
from tvm_split.planner.fewest_machines import MARGIN
from tvm_split.planner.predict import Certificate, predict
from tvm_split.planner.prediction import ComparedPlan, Prediction
from tvm_split.planner.problem import Problem, Stage, Timed, gap_of, objective_seconds
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.search.bounds import division_bound
from tvm_split.shard_planning.candidates import ShardCandidates, ShardPlan, worth_timing
from tvm_split.steps import StepProgress
from tvm_split.units import names_of, seconds_text

DIVIDED = "every piece divided over the machines at will, with nothing exchanged"
"""The relaxed plan that gives the lower bound if layers may be sharded."""


@dataclass(frozen=True)
class Choice:
    """The chosen stages with their prediction; if some are sharded, also a function that predicts them with codecs."""

    stages: tuple[Stage, ...]
    prediction: Prediction
    predict_coded: PredictCoded | None = None


class ShardChoice:
    """Considers sharded stages for a problem. ``measures`` says whether parts are measured or only estimated."""

    def __init__(
        self,
        candidates: ShardCandidates,
        profile: ClusterProfile,
        problem: Problem,
        cluster: Workers,
        *,
        measures: bool,
        on_progress: StepProgress | None,
    ) -> None:
        self._candidates = candidates
        self._profile = profile
        self._problem = problem
        self._cluster = cluster
        self._measures = measures
        self._on_progress = on_progress or (lambda what, done, steps: None)

    def given(self, stages: tuple[Stage, ...], best_bound_seconds: float) -> Choice:
        """The prediction of stages by hand; ``best_bound_seconds`` is the lower bound for plans of whole layers."""
        found = self._timed((self._candidates.estimated(stages),))[0]
        bound = min(best_bound_seconds, division_bound(self._problem))
        return self._chosen(found, Certificate(bound, f"given; the bound is of {DIVIDED}"))

    def keeps_demands(self, stages: tuple[Stage, ...]) -> bool:
        """Whether stages, some of them sharded, satisfy the demands, by estimates."""
        return self._candidates.keeps_demands(self._candidates.estimated(stages))

    def beside(self, whole: Choice | None, refusal: PlanError | None = None) -> Choice:
        """The better of the best plan of whole layers and the best plan found with sharded stages.

        ``whole`` is None if there is no plan of whole layers; then ``refusal`` is raised if no other plan is found.
        """
        value = float("inf") if whole is None else self._value(whole.prediction)
        bound = division_bound(self._problem)
        if whole is not None and bound >= value * (1 - MARGIN):
            return self._stays(whole, bound, None)
        self._on_progress("considering splits inside layers", 0, 1)
        candidates = self._candidates.candidates()
        near = worth_timing(candidates, self._problem, value)
        if near and self._measures:
            near = self._candidates.kept(self._timed(near))
        best = min(near, key=lambda each: self._value(each.evaluation), default=None)
        self._on_progress("considering splits inside layers", 1, 1)
        if best is not None and self._value(best.evaluation) < value * (1 - MARGIN):
            return self._chosen(best, self._certificate(best, near, whole, bound))
        if whole is None:
            raise refusal or PlanError("no plan was found")
        return self._stays(whole, bound, best or next(iter(candidates), None))

    def _value(self, timed: Timed) -> float:
        return objective_seconds(self._problem.objective, timed)

    def _timed(self, plans: tuple[ShardPlan, ...]) -> tuple[ShardPlan, ...]:
        return self._candidates.timed(plans, self._cluster, self._on_progress) if self._measures else plans

    def _chosen(self, plan: ShardPlan, certificate: Certificate) -> Choice:
        predicted = partial(predict, self._problem, plan.graph, certificate, self._profile)
        return Choice(plan.stages, predicted(), predicted)

    def _certificate(
        self, best: ShardPlan, others: tuple[ShardPlan, ...], whole: Choice | None, bound: float
    ) -> Certificate:
        value = self._value(best.evaluation)
        lost = [each.compared(self._against(each, best)) for each in others if each is not best]
        if whole is not None:
            bound = min(bound, whole.prediction.lower_bound_seconds)
            machines = list(dict.fromkeys(machine for stage in whole.stages for machine in stage.machines))
            counted = tuple(("+".join(stage.machines), len(stage.layers)) for stage in whole.stages)
            theirs = self._value(whole.prediction)
            lost.insert(
                0,
                ComparedPlan(
                    f"whole layers on {names_of(machines)}",
                    counted,
                    whole.prediction.period_seconds,
                    whole.prediction.latency_seconds,
                    f"the best plan without splits inside layers has {seconds_text(theirs)}, this one "
                    f"{seconds_text(value)}",
                ),
            )
            lost += [each for each in whole.prediction.alternatives if each.stages != counted]
        lost.sort(key=self._value)
        how = "timed in their own shapes" if best.is_timed else "estimated"
        return Certificate(
            bound, f"splits inside layers considered, the best few {how}; the bound is of {DIVIDED}", "", tuple(lost)
        )

    def _against(self, other: ShardPlan, best: ShardPlan) -> str:
        ours, theirs = self._value(best.evaluation), self._value(other.evaluation)
        return f"takes {seconds_text(theirs)}, this one {seconds_text(ours)}"

    def _stays(self, whole: Choice, bound: float, best: ShardPlan | None) -> Choice:
        """Choose the plan of whole layers, and say why no plan with sharded stages is better."""
        prediction, value = whole.prediction, self._value(whole.prediction)
        machines = list(dict.fromkeys(machine for stage in whole.stages for machine in stage.machines))
        kind = "one machine" if len(machines) == 1 else f"{len(machines)} machines with whole layers"
        if best is None:
            reason = f"no split inside layers can pay: {kind} {seconds_text(value)}"
            reason += f", {DIVIDED} {seconds_text(bound)}" if bound >= value * (1 - MARGIN) else ", and none was found"
            alternatives = prediction.alternatives
        else:
            theirs = self._value(best.evaluation)
            pays = "no split inside layers pays" if theirs >= value else "a split inside layers gains too little"
            reason = (
                f"{pays}: {kind} {seconds_text(value)}, best split inside layers {seconds_text(theirs)} ({best.words})"
            )
            alternatives = (*prediction.alternatives, best.compared(f"takes {seconds_text(theirs)}"))
        lower = min(prediction.lower_bound_seconds, bound)
        among = "" if lower == prediction.lower_bound_seconds else f" among whole layers; the bound is of {DIVIDED}"
        whys = filter(None, [prediction.why_no_more_machines, reason])
        return replace(
            whole,
            prediction=replace(
                prediction,
                lower_bound_seconds=lower,
                gap=gap_of(value, lower),
                method=prediction.method + among,
                why_no_more_machines="; ".join(whys),
                alternatives=tuple(sorted(alternatives, key=self._value)),
            ),
        )
