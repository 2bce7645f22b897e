from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.helpers.planner.profiles import chain_problem, chain_profile
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.planner.identical import with_host_averaged, with_identical_averaged
from tvm_split.planner.profile import ClusterProfile, PieceTime
from tvm_split.planner.search import Budget, solve
from tvm_split.planner.search.instance import instance_of


def scattered(slowness: Sequence[float], noise: float = 0.02) -> ClusterProfile:
    """Twelve pieces on machines that are so slow, and links of two sites; each value was measured with some noise."""
    generator = random.Random(7)

    def measured(value: float) -> float:
        return value * generator.uniform(1 - noise, 1 + noise)

    profile = chain_profile(
        {f"machine-{index}": [measured(0.01 * each) for _ in range(12)] for index, each in enumerate(slowness)}
    )
    sites = {each.machine: index % 2 for index, each in enumerate(profile.machines)}
    return replace(
        profile,
        links=tuple(
            replace(
                each,
                bytes_per_second=measured(1e9 if sites.get(each.source) == sites.get(each.destination) else 1e8),
                latency_seconds=measured(1e-3),
            )
            for each in profile.links
        ),
    )


def classes_of(profile: ClusterProfile) -> tuple[tuple[int, ...], ...]:
    return instance_of(chain_problem(profile)).classes


def test_machines_that_scatter_are_counted_by_kind_and_site() -> None:
    """Two kinds at two sites, eight of each kind."""
    profile = scattered([1.0] * 8 + [3.0] * 8)
    assert len(classes_of(profile)) == 16
    assert [len(members) for members in classes_of(with_identical_averaged(profile))] == [4, 4, 4, 4]


def test_sixteen_alike_workers_are_planned_exactly() -> None:
    profile = with_identical_averaged(scattered([1.0] * 16))
    found = solve(chain_problem(profile, stages=12), budget=Budget(work=4e8))
    assert found.gap == 0.0
    assert len(found.stages) == 12


def test_means_stand_for_what_was_measured() -> None:
    profile = scattered([1.0] * 9)
    counted = with_identical_averaged(profile)
    name = profile.pieces[0].name
    mean = sum(each.pieces[name].seconds for each in profile.machines) / 9
    assert all(each.pieces[name].seconds == pytest.approx(mean) for each in counted.machines)


@pytest.mark.parametrize(
    "changes", [{"threads": 2}, {"target": {"kind": "llvm", "mcpu": "znver4"}}, {"memory_free_bytes": 8e9}]
)
def test_other_machines_are_no_kin(changes: dict[str, object]) -> None:
    profile = scattered([1.0] * 10)
    first, *others = profile.machines
    other = replace(profile, machines=(replace(first, **changes), *others))  # type: ignore[arg-type]
    assert with_identical_averaged(other).machines[0].pieces == first.pieces


def in_company(profile: ClusterProfile, *slower: float) -> ClusterProfile:
    """The profile with machines that are so many times as slow in company as alone."""
    machines = tuple(
        replace(
            machine,
            pieces={
                name: PieceTime(each.seconds, each.seconds * times, each.origin)
                for name, each in machine.pieces.items()
            },
        )
        for machine, times in zip(profile.machines, slower, strict=True)
    )
    return replace(profile, machines=machines)


def test_equal_machines_of_a_host_are_alike_though_one_was_disturbed() -> None:
    a, b, slow = {"a": [1.0, 2.0], "b": [1.02, 2.04], "slow": [2.0, 4.0]}.items()
    one_host = in_company(chain_profile(dict((a, b, slow)), hostname="host"), 1.0, 1.3, 1.0)
    first, second, third = with_host_averaged(one_host).machines
    assert first.pieces == second.pieces
    assert [each.contended_seconds for each in first.pieces.values()] == pytest.approx([1.163, 2.326])
    assert third == one_host.machines[2]
    others = in_company(chain_profile(dict((a, b))), 1.0, 1.3)
    assert with_host_averaged(others) == others


def test_few_machines_are_searched_as_measured() -> None:
    profile = scattered([1.0] * 8)
    assert with_identical_averaged(profile) is profile
    names = tuple(each.machine for each in profile.machines)
    assert with_identical_averaged(replace(profile, shared_cores=(SharedCores(names, 8),))).machines is profile.machines
    crowded = with_identical_averaged(replace(profile, shared_cores=(SharedCores(names, 4),)))
    assert [len(members) for members in classes_of(crowded)] == [4, 4]
