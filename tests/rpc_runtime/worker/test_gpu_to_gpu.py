"""Two workers of one host that exchange tensors from GPU to GPU, by a stand-in of CUDA's runtime in each process.

The stand-in's memory is opened by the other process under CUDA's handles, and copied into late, in halves and in a
thread of its own. It ends a process that frees what another has open, or copies into what is closed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.helpers.rpc_runtime.gpu_programs import (
    BLOB,
    all_links,
    batches,
    carried,
    chain,
    compiled_with_blob,
    is_empty,
    opened,
)
from tests.helpers.rpc_runtime.gpu_worker import GpuWorkers, gpu_workers
from tests.helpers.rpc_runtime.joined_executors import evaluate
from tests.helpers.rpc_runtime.pipelines import deployments_left
from tests.helpers.rpc_runtime.random_programs import programs
from tests.helpers.waiting import stop, wait_for
from tvm_split.rpc_runtime.errors import TvmSplitError, WorkerUnavailableError
from tvm_split.rpc_runtime.program.link_setting import Transport
from tvm_split.rpc_runtime.program.program import Program
from tvm_split.rpc_runtime.transports.link_end import SILENCE_SECONDS

ALL_IPC = all_links("AB", Transport.CUDA_IPC)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_with_blob(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def workers(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuWorkers]:
    with gpu_workers("AB", library, tmp_path_factory.mktemp("workers")) as started:
        yield started


@pytest.fixture
def own_workers(library: Path, tmp_path: Path) -> Iterator[GpuWorkers]:
    """With slow copies, so that what happens in the middle happens while one is under way."""
    with gpu_workers("AB", library, tmp_path, slow_microseconds=20_000) as started:
        yield started


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(most_replicas=2, machines="AB", blob=BLOB), count=st.sampled_from([1, 12]))
def test_any_program_from_gpu_to_gpu(program: Program, count: int, workers: GpuWorkers, library: Path) -> None:
    fed = batches(program, count)
    with opened(workers, program, library, ALL_IPC) as pipeline:
        assert carried(pipeline) <= {Transport.CUDA_IPC}
        results = list(pipeline.stream(fed))
    for batch, result in zip(fed, results, strict=True):
        expected = evaluate(program, batch)
        assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))


def test_links_are_from_gpu_to_gpu_and_nothing_stays_when_they_are_closed(workers: GpuWorkers, library: Path) -> None:
    with opened(workers, chain(), library, ALL_IPC) as pipeline:
        pipeline.run(batches(chain(), 1)[0])
    assert all(is_empty(workers, name) for name in "AB")
    files = {name: workers.files(name) for name in "AB"}
    for moment in (0.0, 0.01, 0.05):
        pipeline = opened(workers, chain(), library, ALL_IPC)
        assert carried(pipeline) == {Transport.CUDA_IPC}
        # Three places of its own, and three of the other's.
        assert [workers.areas(name) for name in "AB"] == [6, 6]
        results = pipeline.stream(batches(chain(), 200))
        next(results)
        threading.Event().wait(moment)
        pipeline.close()
        assert all(is_empty(workers, name) for name in "AB")
    assert wait_for(lambda: all(workers.files(name) <= files[name] for name in "AB"))


@pytest.mark.parametrize("dies", "AB")
def test_a_worker_that_is_killed_leaves_nothing_with_the_other(
    dies: str, own_workers: GpuWorkers, library: Path
) -> None:
    (lives,) = set("AB") - {dies}
    with opened(own_workers, chain(), library, ALL_IPC) as pipeline:
        assert carried(pipeline) == {Transport.CUDA_IPC}
        results = pipeline.stream(batches(chain(), 1000))
        for _ in range(5):
            next(results)
        os.kill(own_workers.processes[dies].pid, signal.SIGKILL)
        with pytest.raises(WorkerUnavailableError, match=f"'{dies}'"):
            list(results)
    assert own_workers.processes[lives].poll() is None
    assert is_empty(own_workers, lives)


def test_handles_are_closed_before_the_memory_goes(own_workers: GpuWorkers, library: Path) -> None:
    with opened(own_workers, chain(), library, ALL_IPC) as pipeline:
        next(pipeline.stream(batches(chain(), 100)))
    assert all(is_empty(own_workers, name) for name in "AB")


def test_memory_stays_until_a_sender_that_stands_still_has_let_go(own_workers: GpuWorkers, library: Path) -> None:
    """Freed before, it could be written into when the sender goes on, and be another's by then."""
    program = chain("AB")
    with opened(own_workers, program, library, ALL_IPC) as pipeline:
        results = pipeline.stream(batches(program, 1000))
        next(results)
        stop(own_workers.processes["A"].pid)
        with pytest.raises(TvmSplitError):
            list(results)
    assert deployments_left(own_workers.endpoints["B"]) == ()
    threading.Event().wait(SILENCE_SECONDS)
    assert own_workers.areas("B") == 3
    os.kill(own_workers.processes["A"].pid, signal.SIGCONT)
    assert all(is_empty(own_workers, name) for name in "AB")
    with opened(own_workers, program, library, ALL_IPC) as pipeline:
        assert np.array_equal(pipeline.run([np.array([1, 2])]), evaluate(program, [np.array([1, 2])]))


def test_what_cannot_be_opened_is_shared_through_the_host_and_that_is_said(library: Path, tmp_path: Path) -> None:
    """As between containers, or GPUs that cannot reach each other."""
    with gpu_workers("AB", library, tmp_path, refused=217) as workers:
        with opened(workers, chain(), library, ALL_IPC) as pipeline:
            between = [link for link in pipeline.links() if "client" not in (link.source, link.destination)]
            assert {link.transport for link in between} == {Transport.SHARED_MEMORY}
            for link in between:
                assert "the sender cannot open the receiver's memory on a GPU: the GPU fails: cudaIpc" in link.reason
            fed = batches(chain(), 20)
            results = list(pipeline.stream(fed))
            assert all(np.array_equal(a, evaluate(chain(), b)) for a, b in zip(results, fed, strict=True))
        assert all(is_empty(workers, name) for name in "AB")
        log = (tmp_path / "A.log").read_text()
        assert "the link from 'A' to 'B' is not from GPU to GPU: the sender cannot open" in log
