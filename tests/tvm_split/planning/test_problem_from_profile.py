"""Problems from profiles, and stages of layers from stages of pieces."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tests.helpers.placement.profiles import A, B, chain_problem, chain_profile, graph_of
from tvm_split.cluster.machine import SharedCores
from tvm_split.errors import PlanError
from tvm_split.placement.problem import Pin, Stage
from tvm_split.placement.profile import Bus, ClusterProfile, ModelPiece, StreamingCost
from tvm_split.placement.search.instance import instance_of
from tvm_split.planning.problem_from_profile import stages_of_layers, stages_of_pieces, with_identical_averaged

TWO = {A: [0.001, 0.002, 0.003], B: [0.002, 0.004, 0.006]}


def with_bus(profile, machine, bus):
    machines = tuple(
        dataclasses.replace(machine_profile, bus=bus if machine_profile.machine == machine else None)
        for machine_profile in profile.machines
    )
    return dataclasses.replace(profile, machines=machines)


def test_the_bus_to_a_gpu_is_a_part_of_its_links():
    profile = with_bus(chain_profile(TWO, bytes_per_second=3e9, latency_seconds=1e-4), B, Bus(6e9, 2e-5))
    links = {(link.source, link.destination): link for link in chain_problem(profile).links}
    for ends, link in links.items():
        speed, latency = (2e9, 1.2e-4) if B in ends else (3e9, 1e-4)
        assert link.bytes_per_second == pytest.approx(speed), ends
        assert link.latency_seconds == pytest.approx(latency), ends
    # A byte takes the sum of the times on bus and link; over free links, only the time on the bus.
    handed = chain_problem(with_bus(chain_profile(TWO, bytes_per_second=math.inf), B, Bus(6e9, 2e-5)))
    assert {link.bytes_per_second for link in handed.links if B in (link.source, link.destination)} == {6e9}


def test_from_gpu_to_gpu_no_bus_is_passed():
    """Other links, and the opposite direction, which is over shared memory, still use the buses."""
    profile = chain_profile(TWO, bytes_per_second=3e9, latency_seconds=1e-4)
    machines = tuple(dataclasses.replace(machine, bus=Bus(6e9, 2e-5)) for machine in profile.machines)
    carried = {(A, B): "nccl", (B, A): "shm"}
    links = (
        dataclasses.replace(link, transport=carried.get((link.source, link.destination), "")) for link in profile.links
    )
    profile = dataclasses.replace(profile, machines=machines, links=tuple(links))
    speeds = {
        (link.source, link.destination): (link.bytes_per_second, link.latency_seconds)
        for link in chain_problem(profile).links
    }
    assert speeds[A, B] == (3e9, 1e-4)
    assert speeds[B, A] == pytest.approx((1.5e9, 1.4e-4))
    assert speeds["client", A] == pytest.approx((2e9, 1.2e-4))


def with_streaming(profile, streaming):
    machines = tuple(
        dataclasses.replace(machine, memory_free_bytes=1e9, streaming=streaming) for machine in profile.machines
    )
    return dataclasses.replace(profile, machines=machines)


def test_machines_that_share_cores_wait_for_one_and_the_client_too():
    streaming = StreamingCost(0.003, 4e-9, 0.005, 2e-9)
    profile = with_streaming(chain_profile(TWO, contention=2.4), streaming)
    shared = dataclasses.replace(profile, shared_cores=(SharedCores((A, B, "client"), 1),))
    apart, crowded = chain_problem(profile), chain_problem(shared)
    assert [machine.contention for machine in apart.machines] == pytest.approx([2.4, 2.4])
    # The kernels' times do not include waiting for a core: all of it is contention.
    assert [machine.contention for machine in crowded.machines] == pytest.approx([2.4, 2.4])
    for problem in (apart, crowded):
        assert [machine.transfer_seconds for machine in problem.machines] == pytest.approx([0.003, 0.003])
    assert crowded.shared_cores == shared.shared_cores
    assert crowded.client_transfer_seconds == pytest.approx(0.005)
    assert crowded.client_transfer_seconds_per_byte == pytest.approx(2e-9)
    assert (apart.shared_cores, apart.client_transfer_seconds) == ((), 0.0)
    enough = dataclasses.replace(shared, shared_cores=(SharedCores((A, B, "client"), 2),))
    assert chain_problem(enough).client_transfer_seconds == pytest.approx(0.005)


def test_pins_take_all_pieces_below_a_name():
    profile = chain_profile(TWO)
    named = [
        ModelPiece("block.0.conv", ("block.0.conv", "block.0.relu"), 1, 1),
        ModelPiece("block.1", ("block.1",), 1, 1),
    ]
    times = [machine.pieces["layer_0"] for machine in profile.machines]
    profile = dataclasses.replace(
        profile,
        pieces=tuple(named),
        machines=tuple(
            dataclasses.replace(machine, pieces={piece.name: time for piece in named})
            for machine, time in zip(profile.machines, times, strict=True)
        ),
    )
    problem = chain_problem(profile, pin={"block.0.relu": A}, keep_off={"block": B})
    assert problem.pins == (
        Pin("block.0.conv", A),
        Pin("block.0.conv", not_on=B),
        Pin("block.1", not_on=B),
    )


def test_a_pin_of_a_layer_that_takes_no_time_is_told():
    with pytest.raises(PlanError, match=r"layer 'layer_9' is to be pinned to 'machine-a', and takes no time"):
        chain_problem(chain_profile(TWO), pin={"layer_9": A})


@st.composite
def solved(draw):
    """Stages of a chain of pieces on different machines, some of them replicas."""
    count = draw(st.integers(1, 8))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=4)) if count > 1 else [])
    machines = iter(f"machine-{letter}" for letter in "abcdefghijklmno")
    stages = []
    for start, end in itertools.pairwise([0, *cuts, count]):
        replicas = draw(st.integers(1, 3))
        weights = draw(st.lists(st.integers(1, 9), min_size=replicas, max_size=replicas))
        shares = tuple(weight / sum(weights) for weight in weights)
        names = tuple(itertools.islice(machines, replicas))
        stages.append(Stage(names, tuple(f"layer_{index}" for index in range(start, end)), shares))
    return count, tuple(stages)


@given(solved())
def test_layers_and_back(case):
    count, stages = case
    profile = chain_profile({f"machine-{letter}": [0.001] * count for letter in "abcdefghijklmno"})
    planned = stages_of_layers(graph_of(profile), profile, stages)
    assert [layer for stage in planned for layer in stage.layers] == [f"layer_{index}" for index in range(count)]
    back = stages_of_pieces(profile, planned)
    assert [(stage.machines, stage.layers) for stage in back] == [(stage.machines, stage.layers) for stage in stages]
    for converted, original in zip(back, stages, strict=True):
        assert converted.shares == pytest.approx(original.shares)


def test_a_boundary_inside_of_a_piece_was_not_measured():
    profile = chain_profile(TWO)
    joined = ModelPiece("layer_0", ("layer_0", "layer_1"), 1, 1)
    profile = dataclasses.replace(profile, pieces=(joined, profile.pieces[2]))
    cut = (Stage((A,), ("layer_0",)), Stage((B,), ("layer_1", "layer_2")))
    assert stages_of_pieces(profile, cut) is None
    assert stages_of_pieces(profile, (Stage((A,), ("layer_0", "layer_1")),)) is None


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
