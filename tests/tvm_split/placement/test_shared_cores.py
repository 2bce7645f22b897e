import dataclasses

import pytest

from tests.helpers.placement.problems import on_one_host, one_each
from tests.helpers.placement.steps import evaluate_stages
from tvm_split.cluster.machine import SharedCores
from tvm_split.placement.problem import Edge, Stage
from tvm_split.placement.search import Budget, solve
from tvm_split.placement.search.bounds import division_bound


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


@pytest.mark.parametrize("skips", [False, True])
def test_transfers_on_shared_cores_are_in_the_bound(skips: bool) -> None:
    """A transfer costs its sender, its receiver or the client 2 % of all computing, so the cores limit the plan."""
    problem = on_one_host(2, 24, 2, client_transfer_seconds=0.005)
    skip = tuple(Edge(f"layer-{index}", f"layer-{index + 3}", 8.0) for index in (0, 5, 12, 18))
    problem = dataclasses.replace(
        problem,
        machines=tuple(dataclasses.replace(machine, transfer_seconds=0.005) for machine in problem.machines),
        edges=problem.edges + (skip if skips else ()),
    )
    budget = Budget(work=1e9)
    solution = solve(problem, budget=budget)
    assert solution.evaluation.period_seconds == pytest.approx((24 * 0.01 + 6 * 0.005) / 2)
    assert solution.gap == pytest.approx(0.0, abs=1e-6)
    assert budget.used_share < 0.1


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
