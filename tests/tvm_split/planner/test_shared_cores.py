from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.planner.problems import on_one_host, one_each
from tests.helpers.planner.steps import evaluate_stages
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.planner.problem import Stage
from tvm_split.planner.search import solve
from tvm_split.planner.search.bounds import division_bound


def test_eight_workers_of_two_cores_are_as_fast_as_two() -> None:
    problem = on_one_host(8, 8, 2)
    evaluation = evaluate_stages(problem, one_each(problem))
    assert evaluation.period_seconds == pytest.approx(8 * 0.01 / 2)
    assert evaluation.limiting.startswith("computing on the 2 cores that worker-0, worker-1, ")
    assert evaluation.limiting.endswith("worker-7 and the client share")
    solution = solve(problem)
    assert solution.evaluation.period_seconds == pytest.approx(0.04)
    assert solution.gap <= 1e-5
    assert len(solution.stages) == 2


def test_the_client_takes_its_part_where_it_is_on_the_host() -> None:
    problem = on_one_host(1, 1, 1, client_transfer_seconds=0.002, client_transfer_seconds_per_byte=0.0005)
    assert evaluate_stages(problem, one_each(problem)).period_seconds == pytest.approx(0.01 + 2 * 0.002 + 16 * 0.0005)
    elsewhere = dataclasses.replace(problem, shared_cores=(SharedCores(("worker-0",), 1),))
    assert evaluate_stages(elsewhere, one_each(elsewhere)).period_seconds == pytest.approx(0.01)


def test_threads_count_and_a_gpu_does_not() -> None:
    problem = on_one_host(2, 2, 4)
    machines = dataclasses.replace(problem.machines[0], cores=4), dataclasses.replace(problem.machines[1], cores=0)
    problem = dataclasses.replace(problem, machines=machines)
    (cores,) = evaluate_stages(problem, one_each(problem)).shared_cores
    assert cores.busy_seconds == pytest.approx(4 * 0.01)


def test_replicas_share_the_cores_too() -> None:
    problem = on_one_host(4, 1, 2, replicas=True)
    evaluation = evaluate_stages(
        problem, [Stage(tuple(machine.name for machine in problem.machines), ("layer-0",), ())]
    )
    assert evaluation.period_seconds == pytest.approx(0.005)


def test_the_bound_of_a_latency_knows_no_cores_as_no_latency_does() -> None:
    problem = on_one_host(2, 2, 1, objective="latency")
    latency = solve(problem).evaluation.latency_seconds
    assert latency == pytest.approx(0.02)
    assert division_bound(problem) == pytest.approx(latency / 2, rel=1e-5)
    assert division_bound(dataclasses.replace(problem, objective="throughput")) == pytest.approx(0.02, rel=1e-5)
