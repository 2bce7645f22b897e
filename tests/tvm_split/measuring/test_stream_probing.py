"""Streams through stages that compute, alone and at the same time; a worker that dies is named."""

from __future__ import annotations

import math
import os
import platform
import signal
from collections.abc import Callable, Iterator

import pytest

from tvm_split.measuring import link_samples, stream_probing
from tvm_split.measuring.probe_programs import ProbePrograms
from tvm_split.measuring.stream_probing import CROWD_PRODUCTS, PRODUCTS, probe_crowd, probe_streams
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.client.pipeline import Pipeline
from tvm_split.rpc_runtime.errors import WorkerError

A, B = "left", "right"
Opened = Callable[[str, int], Pipeline]


@pytest.fixture(scope="module")
def programs() -> ProbePrograms:
    return ProbePrograms(dict.fromkeys((A, B), platform.machine()))


@pytest.fixture(scope="module")
def opened(programs: ProbePrograms) -> Iterator[Opened]:
    with LocalWorkers([A, B]) as workers:
        yield opened_on(workers, programs)


def opened_on(workers: LocalWorkers, programs: ProbePrograms) -> Opened:
    return lambda name, products: Pipeline.open(
        programs.busy(name, products), workers.endpoints, programs.blob_path, timeout_seconds=60.0
    )


def test_each_machine_has_a_sample_of_every_duration(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_probing, "ROUNDS", 2)
    monkeypatch.setattr(link_samples, "SLOWEST_STREAM", math.inf)  # or rounds go on for as long as others compute too
    found = probe_streams([A, B], opened, 60.0)
    assert set(found.samples) == {A, B}
    for samples in found.samples.values():
        short, long = samples
        assert len(samples) == len(PRODUCTS)
        assert 0 < short.compute_seconds < long.compute_seconds
        assert short.single_seconds > short.compute_seconds
        assert long.period_seconds > short.period_seconds > 0


def test_a_chain_of_machines_that_share_cores_is_measured(
    programs: ProbePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_probing, "ROUNDS", 2)
    with LocalWorkers([A, B]) as workers:

        def opened(products: int) -> Pipeline:
            program = programs.busy_chain([A, B], products) if products else programs.chain([A, B], [64] * 3)
            return Pipeline.open(program, workers.endpoints, programs.blob_path, timeout_seconds=60.0)

        found = probe_crowd(opened)
    short, long = found.samples
    assert (short.products, long.products) == CROWD_PRODUCTS
    assert 0 < short.compute_seconds < long.compute_seconds
    assert all(sample.single_seconds > sample.compute_seconds for sample in found.samples)
    assert 0 < found.period_seconds < long.single_seconds
    assert short.period_seconds is not None
    assert short.period_seconds > found.period_seconds
    assert long.period_seconds is None


def test_medians_that_contradict_themselves_are_measured_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_probing, "ROUNDS", 1)
    monkeypatch.setattr(stream_probing, "MOST_ROUNDS", 3)
    monkeypatch.setattr(stream_probing, "MOST_SECONDS", math.inf)
    period = stream_probing._period
    for slowest, rounds in ((0.0, 3), (math.inf, 1)):
        measured: list[Pipeline] = []
        monkeypatch.setattr(link_samples, "SLOWEST_STREAM", slowest)
        monkeypatch.setattr(
            stream_probing, "_period", lambda *given, to=measured: to.append(given[0]) or period(*given)
        )
        found = probe_streams([A], opened, 60.0)
        assert len(measured) == rounds * len(PRODUCTS)
        assert bool(found.doubts) == (slowest == 0.0)


def test_a_worker_that_dies_is_named(programs: ProbePrograms) -> None:
    opened_so_far = 0

    def then_killed(name: str, products: int) -> Pipeline:
        nonlocal opened_so_far
        pipeline = opened_on(workers, programs)(name, products)
        opened_so_far += 1
        if opened_so_far == 2 * len(PRODUCTS):
            os.kill(workers.process_ids[B], signal.SIGKILL)
        return pipeline

    with LocalWorkers([A, B]) as workers, pytest.raises(WorkerError, match=B):
        probe_streams([A, B], then_killed, 60.0)
