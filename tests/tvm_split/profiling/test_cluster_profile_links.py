"""Profiles of a model with the links between its machines, measured on worker processes."""

import math

import pytest

import tvm_split
from rpc_runtime.hardware import own_cores
from tests.models.small_onnx_model import small_model
from tvm_split.profiling import link_samples
from tvm_split.profiling.cluster_profile import profile_model

A, B = "machine-a", "machine-b"
pytestmark = pytest.mark.usefixtures("busy_machine")


@pytest.fixture(scope="module")
def measured(tmp_path_factory, busy_machine):
    """A model, where its profile is kept, the profile, and what was said while it was made."""
    model, folder, steps = tvm_split.load_model(small_model()), tmp_path_factory.mktemp("kept"), []
    cluster = tvm_split.Cluster.local(workers=2)
    profile = profile_model(model, cluster, cache_folder=folder, on_progress=lambda *step: steps.append(step)).profile
    return model, folder, profile, steps


def test_pieces_and_links_are_measured(measured):
    _, _, profile, steps = measured
    assert [machine.machine for machine in profile.machines] == [A, B]
    assert [layer for piece in profile.pieces for layer in piece.layers] == [
        "conv_1", "relu_1", "conv_2", "flatten", "dense"
    ]  # fmt: skip
    for machine in profile.machines:
        assert {time.origin for time in machine.pieces.values()} == {"measured"}
        assert machine.measured_at > 0
        # Measured apart, in a chain and alone, so that either may come out larger.
        assert machine.streaming.transfer_seconds >= 0
        assert machine.streaming.alone_transfer_seconds >= 0
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


def test_streams_that_contradict_themselves_are_among_the_doubts(measured, monkeypatch):
    """Of alike machines of a host the first one's is measured, and stands for the others."""
    model, folder, *_ = measured
    for slowest, expected in ((math.inf, set()), (0.0, {f"a stream through {A}"})):  # none of them does, and each
        monkeypatch.setattr(link_samples, "SLOWEST_STREAM", slowest)
        doubts = profile_model(model, tvm_split.Cluster.local(workers=2), cache_folder=folder).profile.doubts
        assert {text.split(" had a result every ")[0] for text in doubts if " had a result every " in text} == expected


@pytest.mark.slow
def test_what_is_kept_is_found_again_until_it_is_refreshed(measured):
    model, folder, profile, _ = measured
    again = profile_model(model, tvm_split.Cluster.local(workers=2), cache_folder=folder).profile
    assert again.links == profile.links
    assert [each.pieces for each in again.machines] == [each.pieces for each in profile.machines]
    assert [each.measured_at for each in again.machines] == [each.measured_at for each in profile.machines]
    anew = profile_model(model, tvm_split.Cluster.local(workers=2), cache_folder=folder, refresh=True).profile
    for machine, before in zip(anew.machines, profile.machines, strict=True):
        assert machine.measured_at > before.measured_at
    assert all(link.measured_at > profile.links[0].measured_at for link in anew.links)
