"""Profiles of a model with the links between its machines, measured on worker processes."""

import pytest

import tvm_split
from rpc_runtime.hardware import own_cores
from tests.models.small_onnx_model import small_model
from tvm_split.profiling.cluster_profile import profile_model

A, B = "machine-a", "machine-b"
pytestmark = pytest.mark.usefixtures("busy_machine")


def test_pieces_and_links_are_measured(tmp_path):
    model, cluster, steps = tvm_split.load_model(small_model()), tvm_split.Cluster.local(workers=2), []
    profile = profile_model(model, cluster, cache_folder=tmp_path, on_progress=lambda *step: steps.append(step)).profile
    assert [machine.machine for machine in profile.machines] == [A, B]
    assert [layer for piece in profile.pieces for layer in piece.layers] == [
        "conv_1", "relu_1", "conv_2", "flatten", "dense"
    ]  # fmt: skip
    for machine in profile.machines:
        assert {time.origin for time in machine.pieces.values()} == {"measured"}
        assert machine.measured_at > 0
        assert machine.streaming.transfer_seconds >= 0
    assert {(link.source, link.destination) for link in profile.links} == {
        ("client", A), ("client", B), (A, "client"), (A, B), (B, "client"), (B, A)
    }  # fmt: skip
    assert all(link.bytes_per_second > 0 and link.measured_at > 0 for link in profile.links)
    (shared,) = profile.shared_cores
    assert set(shared.machines) == {A, B, "client"}
    assert shared.cores == own_cores().count
    assert [machine.cores for machine in profile.machines] == [1, 1]
    assert steps
    assert all(0 <= done <= whole for _, done, whole in steps)
