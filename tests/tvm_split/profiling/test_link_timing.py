"""Streams through stages that compute, and through a chain of machines; a worker that dies is named."""

from __future__ import annotations

import math
import os
import platform
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.session import Session
from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.loaded_stage import LoadedStage, tensor_bytes, tensor_slot
from tvm_split.profiling import link_timing
from tvm_split.profiling.link_timing import PRODUCTS, probe_chain, probe_stream
from tvm_split.profiling.probe_programs import ProbePrograms

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


def test_there_is_a_sample_of_every_duration(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_timing, "ROUNDS", 1)
    samples = probe_stream(opened).samples
    assert len(samples) == len(PRODUCTS)
    assert all(min(sample.compute_seconds, sample.single_seconds, sample.period_seconds) > 0 for sample in samples)


@pytest.mark.parametrize(("size_bytes", "most_seconds"), [(0, math.inf), (1 << 20, math.inf), (1 << 20, 0.0)])
def test_a_chain_of_machines_that_share_cores_is_measured(
    size_bytes: int, most_seconds: float, programs: ProbePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_timing, "ROUNDS", 1)
    monkeypatch.setattr(link_timing, "MOST_HANDED_ON_SECONDS", most_seconds)

    def opened(size: int) -> Session:
        program = programs.chain([A, B], [size] * 3)
        return Session(program, workers.endpoints, programs.blob_path, timeout_seconds=60.0)

    with LocalWorkers([A, B]) as workers:
        samples = probe_chain(2, opened, size_bytes).samples
    assert [sample.size_bytes for sample in samples] == [64, *([size_bytes] if size_bytes and most_seconds else [])]
    assert all(min(sample.period_seconds, sample.single_seconds, sample.busy_seconds) > 0 for sample in samples)


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


@pytest.mark.parametrize(("input_bytes", "output_bytes"), [(64, 64), (256, 64), (64, 256)])
def test_what_is_handed_on_is_computed_and_not_copied_by_the_runtime(input_bytes: int, output_bytes: int) -> None:
    programs = ProbePrograms({"here": platform.machine()})
    (stage,) = programs.chain(["here"], [input_bytes, output_bytes]).stages
    library = np.fromfile(programs.blob_path(stage.library.sha256), np.uint8)
    executable = LoadedStage(stage, library, (), {})
    slot = tensor_slot(stage.inputs[0])
    content = np.arange(input_bytes).astype(np.uint8)
    slot.data[:] = content
    (result,) = executable.run([slot.value])
    assert np.array_equal(
        tensor_bytes(result),
        255 - (content[:output_bytes] if input_bytes >= output_bytes else np.repeat(content[:1], output_bytes)),
    )
    assert executable._are_views == [False]
