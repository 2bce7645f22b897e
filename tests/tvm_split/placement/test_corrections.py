"""Replanning from measurements, without oscillation between plans."""

import dataclasses

import pytest
from hypothesis import given, strategies as st

from tests.helpers.placement.profiles import A, B, chain_problem, chain_profile
from tests.helpers.placement.steps import evaluate_stages
from tvm_split.placement.corrections import DEFAULT_THRESHOLD, Change, Measured, calibrated, change_to, corrections_of
from tvm_split.placement.evaluate import keeps_demands
from tvm_split.placement.problem import Evaluation, Stage
from tvm_split.placement.profile import Corrections
from tvm_split.placement.search import Budget, solve

PROFILE = chain_profile({A: [0.002] * 6, B: [0.002] * 6})
HALVES = tuple(
    Stage((machine,), tuple(f"layer_{index}" for index in range(start, start + 3)))
    for machine, start in ((A, 0), (B, 3))
)


@dataclasses.dataclass(frozen=True)
class Replanned:
    """The change, the stages to run from now on, and the best period or latency."""

    change: Change
    stages: tuple[Stage, ...]
    best: Evaluation


def replan(problem, current, threshold=DEFAULT_THRESHOLD, **how):
    now, best = evaluate_stages(problem, current), solve(problem, **how)
    is_possible = keeps_demands(problem, current, now)
    change = change_to(best.evaluation, now, problem, threshold, keeps_demands=is_possible)
    return Replanned(change, best.stages if change.changed else current, best.evaluation)


def test_times_are_scaled_by_machine_and_links_have_the_speed_that_was_measured():
    measured = Measured({A: 2.0}, {(A, B): 2e5})
    corrected = calibrated(PROFILE, corrections_of(measured))
    first, second = corrected.machines
    assert first.pieces["layer_0"].seconds == pytest.approx(0.004)
    assert first.pieces["layer_0"].contended_seconds == pytest.approx(0.004)
    assert second == PROFILE.machines[1]
    speeds = {(link.source, link.destination): link.bytes_per_second for link in corrected.links}
    assert speeds[A, B] == pytest.approx(2e5)
    assert speeds[B, "client"] == 1e9


def test_corrections_add_up_and_outlive_idleness():
    earlier = Corrections(((A, 2.0), (B, 1.5)), ((A, B, 1e6),))
    corrections = corrections_of(Measured({B: 2.0}, {(B, A): 1e5}, earlier))
    assert dict(corrections.compute_ratios) == {A: 2.0, B: 3.0}
    assert corrections.link_speeds == ((A, B, 1e6), (B, A, 1e5))
    assert corrections_of(Measured()) == Corrections()


ratios = st.fixed_dictionaries({A: st.floats(0.2, 5.0), B: st.floats(0.2, 5.0)})
plans = st.tuples(st.integers(1, 5), st.booleans())


def stages_of(case):
    cut, swapped = case
    machines = (B, A) if swapped else (A, B)
    names = [f"layer_{index}" for index in range(6)]
    return tuple(map(Stage, ((machine,) for machine in machines), (tuple(names[:cut]), tuple(names[cut:]))))


@given(ratios, plans, st.floats(0.0, 0.9))
def test_never_for_a_gain_below_the_threshold_and_never_twice(factors, case, threshold):
    problem = chain_problem(calibrated(PROFILE, corrections_of(Measured(factors))))
    current = stages_of(case)
    before = evaluate_stages(problem, current).period_seconds
    replanned = replan(problem, current, threshold, budget=Budget(work=1e9))
    after = evaluate_stages(problem, replanned.stages).period_seconds
    if replanned.change.changed:
        assert after < before * (1 - threshold)
    else:
        assert replanned.stages == current
        assert replanned.best.period_seconds >= before * (1 - threshold) - 1e-12
    again = replan(problem, replanned.stages, threshold)
    assert not again.change.changed
    assert again.stages == replanned.stages


@given(ratios, plans)
def test_plans_do_not_take_turns(truth, case):
    """Every plan is measured on machines that differ from the profile; earlier corrections are kept."""
    real = chain_problem(calibrated(PROFILE, Corrections(tuple(truth.items()))))
    current, corrections, seen = stages_of(case), Corrections(), []
    for _ in range(6):
        believed = chain_problem(calibrated(PROFILE, corrections))
        loads = {load.machine: load.compute_seconds for load in evaluate_stages(believed, current).loads}
        happened = evaluate_stages(real, current)
        measured = Measured(
            {load.machine: load.compute_seconds / loads[load.machine] for load in happened.loads}, earlier=corrections
        )
        corrections = corrections_of(measured)
        replanned = replan(chain_problem(calibrated(PROFILE, corrections)), current)
        seen.append(replanned.change.changed)
        current = replanned.stages
    assert seen[2:] == [False] * 4


def test_latency_counts_where_it_is_the_objective():
    problem = chain_problem(PROFILE, "latency")
    replanned = replan(problem, HALVES, 0.0)
    assert replanned.change.changed
    assert len(replanned.stages) == 1
    assert not replan(problem, HALVES, 0.05).change.changed  # saving one link of 0.1 ms is less than 5 %
    assert replan(dataclasses.replace(problem, objective="throughput"), HALVES, 0.0).stages == HALVES
