"""Estimated profiles, without any machine."""

import pytest
import torch

import tvm_split
from tvm_split.cluster.machine import Link, Machine
from tvm_split.launchers.local import Local
from tvm_split.placement.estimate import BUS, estimated_profile

A, B = "machine-a", "machine-b"


def test_twice_the_threads_take_half_the_time():
    network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16)).eval()
    model = tvm_split.load_model(network, (torch.zeros(8, 64),))
    cluster = tvm_split.Cluster((Machine(A), Machine(B, threads=2)), (Link(A, B, 1e9, 0.25),), launcher=Local())
    profile = estimated_profile(model.description, cluster)
    assert [(piece.name, piece.layers, piece.weight_bytes) for piece in profile.pieces] == [
        ("0", ("0",), 4 * 65 * 32),
        ("1", ("1",), 4 * 33 * 16),
    ]
    first, second = profile.machines
    assert first.pieces["0"].seconds > first.pieces["1"].seconds > 0
    assert second.pieces["0"].seconds == pytest.approx(first.pieces["0"].seconds / 2)
    assert {time.origin for machine in profile.machines for time in machine.pieces.values()} == {"estimated"}
    assert first.hostname != second.hostname
    speeds = {(link.source, link.destination): (link.latency_seconds, link.origin) for link in profile.links}
    assert speeds[A, B] == speeds[B, A] == (0.25, "given")
    assert speeds["client", A][1] == "estimated"


def test_a_gpu_is_taken_to_be_one_and_costs_no_cores():
    """Large products are many times faster on it; small ones take the time of a kernel launch."""
    network = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 2)).eval()
    model = tvm_split.load_model(network, (torch.zeros(64, 4096),))
    gpu = Machine(B, target={"kind": "cuda", "arch": "sm_90"})
    profile = estimated_profile(model.description, tvm_split.Cluster((Machine(A, threads=4), gpu), launcher=Local()))
    first, second = profile.machines
    assert first.pieces["0"].seconds > 20 * second.pieces["0"].seconds
    assert min(piece.seconds for piece in second.pieces.values()) >= 5e-6
    assert (first.cores, second.cores) == (4, 0)
    assert (first.bus, second.bus) == (None, BUS)


def test_links_from_gpu_to_gpu_are_known_where_they_are_asked_for():
    model = tvm_split.load_model(torch.nn.Linear(4, 4).eval(), (torch.zeros(1, 4),))
    names = (A, B, "cpu")
    machines = tuple(
        Machine(name, target={"kind": "cuda", "arch": "sm_90"} if name != "cpu" else None) for name in names
    )
    links = (Link(A, B, 1e11, 1e-5, transport="nccl"), Link(A, "cpu"), Link(B, "cpu"))
    profile = estimated_profile(model.description, tvm_split.Cluster(machines, links, launcher=Local()))
    assert {
        ends for ends in [(link.source, link.destination, link.transport) for link in profile.links] if ends[2]
    } == {
        (A, B, "nccl"),
        (B, A, "nccl"),
    }
