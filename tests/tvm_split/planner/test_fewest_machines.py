"""Machines that hardly gain anything are left out; those that gain are not."""

from __future__ import annotations

import dataclasses

import pytest

from rpc_runtime.program.routes import CLIENT
from tests.helpers.planner.profiles import chain_problem, chain_profile
from tests.helpers.planner.steps import evaluate_stages
from tvm_split.planner.fewest_machines import MARGIN, with_fewest_machines
from tvm_split.planner.problem import Alternative, Edge, Piece, Problem, ProblemLink, ProblemMachine
from tvm_split.planner.search import solve

A, B = "machine-a", "machine-b"


def test_a_gain_that_no_measurement_shows_is_with_fewest_machines():
    problem = chain_problem(chain_profile({A: [0.1, 0.001], B: [0.1, 0.001]}))
    best = solve(problem)
    assert sum(len(stage.machines) for stage in best.stages) == 2
    found = with_fewest_machines(problem, best)
    assert len(found.stages) == 1
    assert found.evaluation == evaluate_stages(problem, found.stages)
    assert found.lower_bound_seconds == best.lower_bound_seconds
    assert found.gap == pytest.approx(1 - best.lower_bound_seconds / found.evaluation.period_seconds)
    assert 0 < found.gap < MARGIN
    assert "2 machines" in found.why_no_more_machines
    assert best.stages in [each.stages for each in found.alternatives]


def test_a_gain_is_kept():
    problem = chain_problem(chain_profile({A: [0.1, 0.01], B: [0.1, 0.01]}))
    best = solve(problem)
    assert with_fewest_machines(problem, best) is best


def test_a_small_gain_is_not_worth_a_much_larger_latency():
    times = {A: [0.01, 0.001], B: [0.01, 0.001]}
    near, far = (chain_problem(chain_profile(times, latency_seconds=latency)) for latency in (1e-5, 0.02))
    assert len(with_fewest_machines(near, solve(near)).stages) == 2
    far = dataclasses.replace(far, links=tuple(
        dataclasses.replace(link, latency_seconds=1e-5 if CLIENT in (link.source, link.destination) else 0.02)
        for link in far.links
    ))  # fmt: skip
    found = with_fewest_machines(far, solve(far))
    assert len(found.stages) == 1
    assert "latency" in found.why_no_more_machines


def test_stages_that_were_asked_for_are_kept():
    problem = chain_problem(chain_profile({A: [0.1, 0.001], B: [0.1, 0.001]}), stages=2)
    best = solve(problem)
    assert with_fewest_machines(problem, best) is best


def test_demands_are_kept():
    profile = chain_profile({A: [0.1, 0.001], B: [0.1, 0.001]})
    free = solve(chain_problem(profile)).evaluation.period_seconds
    problem = chain_problem(profile, minimum_throughput=1 / free)
    best = solve(problem)
    assert with_fewest_machines(problem, best) is best


def test_a_large_gain_is_worth_any_latency():
    times = {A: [0.001, 0.001], B: [0.001, 0.001]}
    problem = chain_problem(chain_profile(times, latency_seconds=0.05))
    best = solve(problem)
    assert best.evaluation.latency_seconds > 10 * 0.002
    assert with_fewest_machines(problem, best) is best


def test_machines_are_spared_where_the_latency_is_none():
    problem = Problem(
        "latency",
        tuple(ProblemMachine(name, transfer_seconds=0.001) for name in (A, B)),
        tuple(ProblemLink(CLIENT, name, 1e6) for name in (A, B)),
        tuple(Piece(name, {A: 0.0, B: 0.0}) for name in ("left", "right")),
        tuple(Edge(CLIENT, name, 0.0) for name in ("left", "right")),
    )
    alone, best = (solve(dataclasses.replace(problem, stages=stages)) for stages in (1, 2))
    other = Alternative("alone", alone.stages, alone.evaluation.period_seconds, alone.evaluation.latency_seconds, "")
    best = dataclasses.replace(best, alternatives=(other,))
    assert sum(len(stage.machines) for stage in best.stages) == 2
    found = with_fewest_machines(problem, best)
    assert sum(len(stage.machines) for stage in found.stages) == 1
    assert "2 machines would gain 0.0%" in found.why_no_more_machines
