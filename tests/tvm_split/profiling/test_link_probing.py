"""Links between real workers, fast and through a slow relay; given, closed, broken or cached links are not measured."""

import contextlib
import json
import math
import os
import platform
import signal
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import psutil
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.gpu_driver import require_toolkit
from tests.helpers.relay import Relay
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.cluster.machine import Link, Machine
from tvm_split.errors import ProfileError
from tvm_split.placement.profile import LinkProfile, StreamingCost
from tvm_split.profiling import link_model
from tvm_split.profiling.link_model import ProbePrograms
from tvm_split.profiling.link_probing import LinkProbe, has_spare_cores, probe_links

A, B = "machine-a", "machine-b"
Endpoints = Mapping[str, WorkerEndpoint]
SIZES = [12_288, 602_112]
pytestmark = pytest.mark.usefixtures("busy_machine")


@pytest.fixture
def workers(three_workers: Workers) -> Endpoints:
    return {name: three_workers.endpoints()[name] for name in (A, B)}


@pytest.fixture(scope="module")
def link_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache of these tests, so that streams through the same workers are measured once."""
    return tmp_path_factory.mktemp("links")


def cluster(workers: Endpoints, *links: Link) -> Cluster:
    return Cluster(tuple(Machine(name, endpoint=end) for name, end in workers.items()), links)


def probe(probed_cluster: Cluster, **options: Any) -> LinkProbe:
    return probe_links(probed_cluster, SIZES, timeout_seconds=60.0, **options)


def by_ends(result: LinkProbe) -> dict[tuple[str, str], LinkProfile]:
    return {(link.source, link.destination): link for link in result.links}


def test_every_link_of_a_local_cluster_is_measured() -> None:
    seen: list[tuple[str, int, int]] = []
    before = set(psutil.Process().children(recursive=True))
    result = probe(Cluster.local(workers=2), on_progress=lambda what, done, steps: seen.append((what, done, steps)))
    assert set(psutil.Process().children(recursive=True)) <= before  # the workers have ended, as after a deployment
    links = by_ends(result)
    assert set(links) == set(permutations([CLIENT, "machine-a", "machine-b"], 2))
    for link in links.values():
        assert link.origin == "measured"
        assert 0 < link.bytes_per_second < math.inf
        assert link.latency_seconds >= 0
    assert set(result.streaming) == {"machine-a", "machine-b"}
    for cost in result.streaming.values():
        assert cost.transfer_seconds_per_byte >= 0
        assert cost.transfer_seconds >= 0
    assert [done for _, done, _ in seen] == list(range(7))
    assert seen[4] == ("links machine-a to machine-b", 4, 6)


def test_of_links_between_equal_machines_two_are_measured() -> None:
    steps: list[str] = []
    links = by_ends(probe(Cluster.local(workers=3), on_progress=lambda what, done, total: steps.append(what)))
    assert set(links) == set(permutations([CLIENT, "machine-a", "machine-b", "machine-c"], 2))
    measured = {ends for ends, link in links.items() if link.origin == "measured"}
    assert len(measured) == len([step for step in steps if step.startswith("links")]) == 6
    speeds = {ends: link.bytes_per_second for ends, link in links.items() if CLIENT not in ends}
    assert set(speeds.values()) == {speed for ends, speed in speeds.items() if ends in measured}


def test_a_worker_that_dies_meanwhile_is_no_matter_of_its_links() -> None:
    with LocalWorkers([A, B]) as own_workers:

        def kill(*step: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # called again and again
                os.kill(own_workers.process_ids[B], signal.SIGKILL)

        with pytest.raises(WorkerUnavailableError, match=f"machine '{B}'.*cannot be reached"):
            probe(cluster(own_workers.endpoints), on_progress=kill)


def test_stages_that_pass_tensors_on_are_made_for_gpus(workers: Endpoints) -> None:
    require_toolkit()
    target = {"kind": "cuda", "arch": "sm_90"}
    programs = ProbePrograms(dict.fromkeys((A, B), platform.machine()), dict.fromkeys((A, B), target))
    on_gpus, on_cpus = (programs.chain([A, B], [64, 4096, 64], on_gpus=on) for on in (True, False))
    assert [stage.device for stage in on_gpus.stages] == ["cuda", "cuda"]
    assert [stage.device for stage in on_cpus.stages] == ["cpu", "cpu"]
    libraries = [programs.blob_path(stage.library.sha256).read_bytes() for stage in on_gpus.stages]
    assert all(b"sm_90" in library for library in libraries)
    assert len({stage.library for stage in (*on_gpus.stages, *on_cpus.stages)}) == 4


def test_what_is_given_is_believed_and_what_is_closed_left_out(workers: Endpoints, link_cache: Path) -> None:
    believed = Link(A, B, 1e6, 0.5)
    result = probe(cluster(workers, believed, Link(B, A, 0), Link(A, CLIENT, 2e6)), cache_folder=link_cache)
    links = by_ends(result)
    assert (links[A, B].bytes_per_second, links[A, B].latency_seconds, links[A, B].origin) == (1e6, 0.5, "given")
    assert (links[CLIENT, A].bytes_per_second, links[CLIENT, A].origin) == (2e6, "given")
    assert links[CLIENT, B].origin == "measured"
    assert (B, A) not in links
    assert set(result.streaming) == {A, B}


def test_a_pair_that_cannot_reach_each_other_is_named(workers: Endpoints) -> None:
    relay = Relay(workers[B].address)
    relay.close()  # no worker listens there any more
    with pytest.raises(ProfileError) as caught:
        probe(cluster(workers, Link(A, B, address=relay.address)))
    for part in (f"the link from {A!r} to {B!r} cannot be measured", relay.address, "bytes_per_second: 0"):
        assert part in str(caught.value)


def test_what_was_measured_is_found_again(workers: Endpoints, link_cache: Path) -> None:
    first = probe(cluster(workers), cache_folder=link_cache)
    assert probe(cluster(workers), cache_folder=link_cache) == first
    with_another_address = cluster(workers, Link(A, B, address=workers[B].address))
    changed = by_ends(probe(with_another_address, cache_folder=link_cache))
    assert changed[A, B] != by_ends(first)[A, B]
    assert changed[B, A].measured_at == by_ends(first)[B, A].measured_at
    again = by_ends(probe(cluster(workers), cache_folder=link_cache, refresh=True))
    assert again[B, A].measured_at > by_ends(first)[B, A].measured_at


def test_transfers_cost_nothing_where_a_core_is_left() -> None:
    with LocalWorkers([A], pin=False) as workers:
        worker = describe(workers.endpoints[A], PATIENCE_SECONDS)
    assert has_spare_cores(A, {A: worker}) == (worker.cores > 1)
    assert has_spare_cores(A, {A: replace(worker, cores=3), B: worker})
    assert not has_spare_cores(A, {A: replace(worker, cores=2), B: worker})
    assert not has_spare_cores(A, {A: replace(worker, cores=2), B: replace(worker, hostname="another container")})
    assert has_spare_cores(A, {A: replace(worker, cores=2), B: replace(worker, boot_id="another host")})


def test_stages_in_one_process_hand_their_tensors_over() -> None:
    result = probe(Cluster.in_process(machines=2))
    assert set(by_ends(result)) == set(permutations([CLIENT, "machine-a", "machine-b"], 2))
    assert {link.bytes_per_second for link in result.links} == {1e12}
    assert set(result.streaming.values()) == {StreamingCost()}


@pytest.mark.slow
def test_links_are_believed_if_a_round_trip_does_not_contradict_them(
    workers: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Cluster((Machine(A, endpoint=workers[A]),))
    first = probe(alone, cache_folder=tmp_path)
    assert probe(alone, cache_folder=tmp_path).links == first.links
    for path in tmp_path.glob("*.json"):
        content = json.loads(path.read_bytes().partition(b"\n")[2])
        for entry in content["entries"].values():
            for sample in entry["samples"]:
                sample["single_seconds"] *= 100
        path.write_text(json.dumps(content))
    monkeypatch.setattr(link_model, "DISAGREEMENT", 5.0)
    again = probe(alone, cache_folder=tmp_path)
    assert all(now.measured_at > then.measured_at for now, then in zip(again.links, first.links, strict=True))
