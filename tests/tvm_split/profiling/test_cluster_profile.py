"""Profiles of a small model, measured through real workers and in this process."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime import hardware
from rpc_runtime.hardware import HostCores
from tests.helpers.scripted_kernels import Noise, ScriptedKernels
from tvm_split import Cluster, Machine
from tvm_split.errors import ProfileError
from tvm_split.launchers.local import InProcess
from tvm_split.placement.profile import ClusterProfile
from tvm_split.profiling import kernel_timing
from tvm_split.profiling.cluster_profile import MachineReport, measured_pieces

pytestmark = pytest.mark.usefixtures("busy_machine")


def small_network(classes: int = 10) -> tvm_split.Model:
    """Return a network with five kernels, which all differ."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, classes))
    return tvm_split.load_model(network.eval(), (torch.zeros(1, 3, 16, 16),))


@pytest.fixture(scope="module")
def model() -> tvm_split.Model:
    return small_network()


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with Cluster.local(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def measured(model: tvm_split.Model, workers: Cluster, cache: Path) -> tuple[ClusterProfile, tuple[MachineReport, ...]]:
    return measured_pieces(model, workers, cache_folder=cache)


def test_every_piece_on_every_machine(model: tvm_split.Model, measured: object) -> None:
    profile, _ = measured
    graph = model.graph
    assert {layer for piece in profile.pieces for layer in piece.layers} == set(graph.layers) - graph.independent
    assert [machine.machine for machine in profile.machines] == ["machine-a", "machine-b"]
    assert profile.links == ()
    for machine in profile.machines:
        assert list(machine.pieces) == [piece.name for piece in profile.pieces]
        for piece_time in machine.pieces.values():
            assert piece_time.origin == "measured"
            assert math.isfinite(piece_time.contended_seconds)
            assert piece_time.seconds > 0
        assert min(machine.operations_per_second, machine.bytes_per_second, machine.memory_free_bytes) > 0
        assert machine.measured_at <= time.time()
    assert sum(piece.weight_bytes for piece in profile.pieces) > 0
    assert all(piece.activation_bytes > 0 for piece in profile.pieces)


def test_of_equal_machines_the_first_and_the_last_are_timed(model: tvm_split.Model, tmp_path: Path) -> None:
    """As many machines run at the same time as there are cores; five together would measure the wait for a core."""
    steps: list[str] = []
    names = [f"machine-{letter}" for letter in "abcde"]
    with Cluster.local(5) as cluster:
        profile, _ = measured_pieces(
            model,
            cluster,
            cache_folder=tmp_path,
            on_progress=lambda what, done, total: steps.append(what),
        )
        timed = {name for name in names for what in steps if what.startswith("timing") and f"on {name}" in what}
        _, again = measured_pieces(model, cluster, cache_folder=tmp_path)
    machines = {machine.machine: machine for machine in profile.machines}
    assert timed >= {"machine-a", "machine-e"}
    assert machines["machine-b"].pieces == machines["machine-d"].pieces
    if not profile.doubts:
        assert len({report.cached for report in again}) == 1
    together = {what for what in steps if what.endswith("at the same time")}
    cores = hardware.own_cores().count
    assert all(what.count("machine-") == min(5, max(2, cores)) for what in together)


def test_equal_kernels_of_another_model_are_known(workers: Cluster, cache: Path, measured: object) -> None:
    wider = small_network(classes=11)
    _, reports = measured_pieces(wider, workers, cache_folder=cache)
    assert all(report.measured == 1 and report.cached > 3 for report in reports)


def test_what_cannot_be_timed_is_estimated(tmp_path: Path) -> None:
    class Divides(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.relu((x // y).float()).sum(1)

    numbers = torch.ones(4, 6, dtype=torch.int64)
    model = tvm_split.load_model(Divides().eval(), (numbers, numbers))
    profile, reports = measured_pieces(model, Cluster.in_process(1, threads=1), cache_folder=tmp_path)
    (machine,) = profile.machines
    assert "estimated" in {piece.origin for piece in machine.pieces.values()}
    assert all(piece.seconds > 0 for piece in machine.pieces.values())
    assert reports[0].estimated > 0
    assert all(piece.seconds == piece.contended_seconds for piece in machine.pieces.values())  # nothing runs beside it


def test_a_digest_is_of_the_graph_and_its_shapes() -> None:
    def digest(network: nn.Module, batch: int) -> str:
        return tvm_split.load_model(network.eval(), (torch.zeros(batch, 4),)).graph_digest

    assert digest(nn.Linear(4, 4), 1) == digest(nn.Linear(4, 4), 1)
    assert len({digest(nn.Linear(4, 4), 1), digest(nn.Linear(4, 4), 2), digest(nn.Linear(4, 5), 1)}) == 3


def test_a_gpu_cannot_be_timed_in_this_process(model: tvm_split.Model, tmp_path: Path) -> None:
    cluster = Cluster((Machine("machine-a", target={"kind": "cuda", "arch": "sm_90"}),), launcher=InProcess())
    with pytest.raises(ProfileError, match="only the CPU can be timed"):
        measured_pieces(model, cluster, cache_folder=tmp_path)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Noise:
    """Return the noise of the one machine in this process."""
    noise = Noise()
    session = ScriptedKernels("machine-a", noise)
    monkeypatch.setattr(kernel_timing, "open_session", lambda cluster, timeout_seconds, machine: session)
    return noise


@pytest.mark.parametrize(
    ("later", "is_measured_again"),
    [
        ([1.0], False),
        ([1.9], False),  # frequencies and caches vary
        ([0.4], True),  # faster: the cached time was disturbed
        ([3.0], True),  # slower, and confirmed
        ([3.0, 1.0], False),  # disturbed for a moment
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.5, 3.0, 2.5, 2.2], False),  # slower, and never the same twice
    ],
)
def test_what_is_kept_is_used_unless_one_kernel_is_faster_or_surely_slower(
    model: tvm_split.Model, tmp_path: Path, noise: Noise, later: list[float], is_measured_again: bool
) -> None:
    cluster = Cluster.in_process(1, threads=1)
    _, (first, *_) = measured_pieces(model, cluster, cache_folder=tmp_path)
    noise.change(later)
    _, (again, *_) = measured_pieces(model, cluster, cache_folder=tmp_path)
    assert (again.measured, again.cached) == ((first.measured, 0) if is_measured_again else (0, first.measured))


def test_times_are_kept_for_so_many_cores(
    model: tvm_split.Model, tmp_path: Path, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one core, the machines of a host are not timed at the same time; on two, they slow each other down."""
    for cores in (HostCores("", (0,)), HostCores("", (0, 1))):
        monkeypatch.setattr(hardware, "own_cores", lambda cores=cores: cores)
        _, reports = measured_pieces(model, Cluster.local(2), cache_folder=tmp_path)
        assert all(report.cached == 0 and report.measured for report in reports)


def test_what_no_round_confirms_is_a_doubt_and_not_kept(model: tvm_split.Model, tmp_path: Path, noise: Noise) -> None:
    cluster = Cluster.in_process(1, threads=1)
    noise.change([1.0 + number for number in range(20)])
    profile, _ = measured_pieces(model, cluster, cache_folder=tmp_path)
    assert "machine-a" in profile.doubts[0]
    noise.change([1.0])
    profile, reports = measured_pieces(model, cluster, cache_folder=tmp_path)
    assert reports[0].cached == 0
    assert profile.doubts == ()


def test_a_kept_time_gives_way_to_a_faster_one_and_to_a_confirmed_slower_one(
    model: tvm_split.Model, tmp_path: Path, noise: Noise
) -> None:
    cluster = Cluster.in_process(1, threads=1)

    def kept_seconds(script: list[float]) -> float:
        noise.change(script)
        measured_pieces(model, cluster, cache_folder=tmp_path, refresh=True)
        noise.change([1.0])
        (machine,) = measured_pieces(model, cluster, cache_folder=tmp_path)[0].machines
        return sum(piece.seconds for piece in machine.pieces.values())

    first = kept_seconds([1.0])
    unconfirmed = [1.2 + number for number in range(20)]
    assert kept_seconds(unconfirmed) == pytest.approx(first)
    assert kept_seconds([1.2]) > 1.1 * first
    # The first measurement is that of the peaks.
    assert kept_seconds([1.0, 0.8, *unconfirmed]) < first


def test_after_the_deadline_the_rest_is_estimated_until_it_is_planned_again(
    model: tvm_split.Model, tmp_path: Path, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path / "cache"))
    cluster = Cluster.in_process(1, threads=1)
    hurried, (report,) = measured_pieces(model, cluster, cache_folder=tmp_path, deadline=time.monotonic())
    late = report.estimated
    assert report.measured == 1
    assert f"{late} of {late + 1} kernels were not timed on machine-a" in hurried.doubts[0]
    pieces = hurried.machines[0].pieces.values()
    assert {piece.origin for piece in pieces} == {"measured", "estimated"}
    assert all(0 < piece.seconds < math.inf for piece in pieces)
    whole, (report,) = measured_pieces(model, cluster, cache_folder=tmp_path)
    assert (report.measured, report.cached, report.estimated) == (late, 1, 0)
    assert whole.doubts == ()
    assert {piece.origin for piece in whole.machines[0].pieces.values()} == {"measured"}
