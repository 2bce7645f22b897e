"""Streams through stages that compute, and through a chain of machines; a worker that dies is named."""

from __future__ import annotations

import math
import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.session import Session
from rpc_runtime.errors import WorkerError
from tvm_split.profiling import link_samples, stream_probing
from tvm_split.profiling.link_store import CERTAIN
from tvm_split.profiling.probe_programs import ProbePrograms
from tvm_split.profiling.stream_probing import PRODUCTS, probe_chain, probe_stream

A, B = "left", "right"
Opened = Callable[[int], Session]


@pytest.fixture(scope="module")
def programs() -> ProbePrograms:
    return ProbePrograms(dict.fromkeys((A, B), platform.machine()))


@pytest.fixture(scope="module")
def opened(programs: ProbePrograms) -> Iterator[Opened]:
    with LocalWorkers([A, B]) as workers:
        yield opened_on(workers, programs)


def opened_on(workers: LocalWorkers, programs: ProbePrograms) -> Opened:
    return lambda products: Session(
        programs.busy(A, products), workers.endpoints, programs.blob_path, timeout_seconds=60.0
    )


def opened_through(workers: LocalWorkers, programs: ProbePrograms) -> Callable[[Sequence[str], int], Session]:
    def opened(names: Sequence[str], size: int) -> Session:
        program = programs.chain(names, [size] * (len(names) + 1)) if size else programs.reading(names, 64)
        return Session(program, workers.endpoints, programs.blob_path, timeout_seconds=60.0)

    return opened


def test_there_is_a_sample_of_every_duration(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_probing, "ROUNDS", 2)
    monkeypatch.setattr(link_samples, "SLOWEST_STREAM", math.inf)  # or rounds go on for as long as others compute too
    samples = probe_stream(opened).samples
    assert len(samples) == len(PRODUCTS)
    assert all(min(each.compute_seconds, each.single_seconds, each.period_seconds) > 0 for each in samples)


@pytest.mark.parametrize(("size_bytes", "most_seconds"), [(0, math.inf), (1 << 20, math.inf), (1 << 20, 0.0)])
def test_a_chain_of_machines_that_share_cores_is_measured(
    size_bytes: int, most_seconds: float, programs: ProbePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_probing, "ROUNDS", 2)
    monkeypatch.setattr(stream_probing, "CERTAIN", math.inf)
    monkeypatch.setattr(stream_probing, "MOST_HANDED_ON_SECONDS", most_seconds)
    with LocalWorkers([A, B]) as workers:
        found = probe_chain([A, B], 2, opened_through(workers, programs), size_bytes)
    assert [each.size_bytes for each in found.samples] == [64, *([size_bytes] if size_bytes and most_seconds else [])]
    assert found.start_seconds >= 0
    assert all(min(each.period_seconds, each.single_seconds, each.busy_seconds) > 0 for each in found.samples)
    assert math.isfinite(found.scatter)


def test_rounds_of_a_chain_that_part_are_measured_again_and_told(
    programs: ProbePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_probing, "MOST_ROUNDS", 5)
    monkeypatch.setattr(stream_probing, "MOST_SECONDS", math.inf)
    with LocalWorkers([A]) as workers:
        for periods, scatter in (
            ([1.0] * 3, 0.0),
            ([1.0, 9.0, 1.1, 9.0, 1.2], 0.2 / 1.1),
            ([1.0, 9.0, 5.0, 9.0, 8.0], 1.4),
        ):
            given = [7.0, *periods]  # the first does not count
            monkeypatch.setattr(stream_probing, "_period", lambda _, given=given: given.pop(0))
            found = probe_chain([A], 1, opened_through(workers, programs), 0)
            assert found.scatter == pytest.approx(scatter)
            assert found.is_uncertain == (scatter > CERTAIN)


def test_medians_that_contradict_themselves_are_measured_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_probing, "ROUNDS", 1)
    monkeypatch.setattr(stream_probing, "MOST_ROUNDS", 3)
    monkeypatch.setattr(stream_probing, "MOST_SECONDS", math.inf)
    period = stream_probing._period
    for slowest, rounds in ((0.0, 3), (math.inf, 1)):
        measured: list[Session] = []
        monkeypatch.setattr(link_samples, "SLOWEST_STREAM", slowest)
        monkeypatch.setattr(
            stream_probing, "_period", lambda *given, to=measured: to.append(given[0]) or period(*given)
        )
        found = probe_stream(opened)
        assert len(measured) == rounds * len(PRODUCTS)
        assert bool(found.doubts) == (slowest == 0.0)


def test_a_worker_that_dies_is_named(programs: ProbePrograms) -> None:
    opened_so_far = 0

    def then_killed(products: int) -> Session:
        nonlocal opened_so_far
        pipeline = opened_on(workers, programs)(products)
        opened_so_far += 1
        if opened_so_far == len(PRODUCTS):
            os.kill(workers.process_ids[A], signal.SIGKILL)
        return pipeline

    with LocalWorkers([A, B]) as workers, pytest.raises(WorkerError, match=A):
        probe_stream(then_killed)


def test_a_start_is_what_stages_of_a_chain_compute_longer_than_one_alone(
    programs: ProbePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what those do that only hand on: here 5 ms each on two machines, and 3 on one."""
    monkeypatch.setattr(stream_probing, "CERTAIN", math.inf)

    def computed(pipeline: Session) -> tuple[float, float]:
        apart, computes = len(pipeline.program.machines) > 1, pipeline.program.inputs[0].dtype == "float32"
        assert len(pipeline.program.stages) == 2
        return ({(True, True): 12e-3, (True, False): 2e-3, (False, True): 8e-3, (False, False): 2e-3})[
            apart, computes
        ], 1.0

    monkeypatch.setattr(stream_probing, "_single_runs", computed)
    with LocalWorkers([A, B]) as workers:
        found = probe_chain([A, B], 2, opened_through(workers, programs), 0)
    assert found.start_seconds == pytest.approx(2e-3)
