from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.helpers.planner.profiles import chain_problem, chain_profile
from tvm_split.cluster.shared_cores import SharedCores
from tvm_split.planner.identical import with_identical_averaged
from tvm_split.planner.profile import ClusterProfile
from tvm_split.planner.search.instance import instance_of


def scattered(slowness: Sequence[float], noise: float = 0.02) -> ClusterProfile:
    """A profile of twelve pieces on machines with these relative times at two sites; each value has some noise."""
    generator = random.Random(7)

    def measured(value: float) -> float:
        return value * generator.uniform(1 - noise, 1 + noise)

    profile = chain_profile(
        {f"machine-{index}": [measured(0.01 * factor) for _ in range(12)] for index, factor in enumerate(slowness)}
    )
    sites = {machine.machine: index % 2 for index, machine in enumerate(profile.machines)}
    return replace(
        profile,
        links=tuple(
            replace(
                link,
                bytes_per_second=measured(1e9 if sites.get(link.source) == sites.get(link.destination) else 1e8),
                latency_seconds=measured(1e-3),
            )
            for link in profile.links
        ),
    )


def classes_of(profile: ClusterProfile) -> tuple[tuple[int, ...], ...]:
    return instance_of(chain_problem(profile)).classes


def test_machines_that_scatter_are_counted_by_kind_and_site() -> None:
    """Machines of two classes, eight of each, at two sites."""
    profile = scattered([1.0] * 8 + [3.0] * 8)
    assert len(classes_of(profile)) == 16
    assert [len(members) for members in classes_of(with_identical_averaged(profile))] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    "changes", [{"threads": 2}, {"target": {"kind": "llvm", "mcpu": "znver4"}}, {"memory_free_bytes": 8e9}]
)
def test_other_machines_are_no_kin(changes: dict[str, object]) -> None:
    profile = scattered([1.0] * 10)
    first, *rest = profile.machines
    changed = replace(profile, machines=(replace(first, **changes), *rest))  # type: ignore[arg-type]
    assert with_identical_averaged(changed).machines[0].pieces == first.pieces


def test_few_machines_are_searched_as_measured() -> None:
    profile = scattered([1.0] * 8)
    assert with_identical_averaged(profile) is profile
    names = tuple(machine.machine for machine in profile.machines)
    assert with_identical_averaged(replace(profile, shared_cores=(SharedCores(names, 8),))).machines is profile.machines
    crowded = with_identical_averaged(replace(profile, shared_cores=(SharedCores(names, 4),)))
    assert [len(members) for members in classes_of(crowded)] == [4, 4]
