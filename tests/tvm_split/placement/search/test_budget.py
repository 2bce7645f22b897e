import pytest

from tests.helpers.placement.many_machines import many_machines_problem
from tvm_split.placement.search import Budget, solve
from tvm_split.placement.search.budget import OutOfBudgetError


def test_work_is_counted_in_all_parts_of_a_budget():
    whole = Budget(work=100.0)
    half, rest = whole.until(0.5), whole.rest(0.1)
    whole.spend(10.0)
    assert rest.is_used_up
    assert not half.is_used_up
    assert (whole.used_share, half.used_share) == (0.1, 0.2)
    assert whole.rest(0.5).whole_work == 45.0
    half.spend(40.0)
    assert half.is_used_up
    assert whole.used_share == 0.5
    with pytest.raises(OutOfBudgetError):
        half.require()


@pytest.mark.parametrize("network", ["chain", "branches"])
def test_the_same_work_gives_the_same_plan(network):
    problem = many_machines_problem(12, 50, network=network, replicas=True)
    first, second = (solve(problem, budget=Budget(work=2e7)) for _ in "ab")
    assert first == second
