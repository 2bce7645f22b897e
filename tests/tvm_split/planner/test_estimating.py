"""Profiles without machines at hand."""

import pytest
import torch

import tvm_split
from tvm_split.cluster.machine import Link, Machine
from tvm_split.planner.estimating import estimated_profile

A, B = "machine-a", "machine-b"


def test_twice_the_threads_take_half_the_time():
    network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16)).eval()
    model = tvm_split.load_model(network, (torch.zeros(8, 64),))
    cluster = tvm_split.Cluster("local", (Machine(A), Machine(B, threads=2)), (Link(A, B, 1e9, 0.25),))
    found = estimated_profile(model, cluster)
    assert [(each.name, each.layers, each.weight_bytes) for each in found.pieces] == [
        ("0", ("0",), 4 * 65 * 32),
        ("1", ("1",), 4 * 33 * 16),
    ]
    one, two = found.machines
    assert one.pieces["0"].seconds > one.pieces["1"].seconds > 0
    assert two.pieces["0"].seconds == pytest.approx(one.pieces["0"].seconds / 2)
    assert {time.origin for machine in found.machines for time in machine.pieces.values()} == {"estimated"}
    assert one.hostname != two.hostname
    speeds = {(each.source, each.destination): (each.latency_seconds, each.origin) for each in found.links}
    assert speeds[A, B] == speeds[B, A] == (0.25, "given")
    assert speeds["client", A][1] == "estimated"
