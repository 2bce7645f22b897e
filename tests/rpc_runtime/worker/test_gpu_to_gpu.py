"""Two workers of one host that exchange tensors from GPU to GPU, by a stand-in of CUDA's runtime in each process.

The stand-in's memory is opened by the other process under CUDA's handles, and copied into late, in halves and in a
thread of its own. It ends a process that frees what another has open, or copies into what is closed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.helpers.rpc_runtime.cuda_stand_in import compiled
from tests.helpers.rpc_runtime.gpu_worker import GpuWorkers, gpu_workers
from tests.helpers.rpc_runtime.joined_executors import evaluate
from tests.helpers.rpc_runtime.pipelines import deployments_left
from tests.helpers.rpc_runtime.random_programs import programs
from tests.helpers.waiting import stop, wait_for
from tvm_split.rpc_runtime.client.pipeline import Pipeline
from tvm_split.rpc_runtime.errors import TvmSplitError, WorkerUnavailableError
from tvm_split.rpc_runtime.program.link_setting import LinkSetting, Transport
from tvm_split.rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from tvm_split.rpc_runtime.transports.link_end import SILENCE_SECONDS

LIBRARY = b"no library: the stages are the tests' own"
BLOB = BlobSpec(hashlib.sha256(LIBRARY).hexdigest(), len(LIBRARY))
ALL_IPC = {ends: LinkSetting(transport=Transport.CUDA_IPC) for ends in itertools.permutations("AB", 2)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "blob").write_bytes(LIBRARY)
    return compiled(folder)


@pytest.fixture(scope="module")
def workers(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuWorkers]:
    with gpu_workers("AB", library, tmp_path_factory.mktemp("workers")) as started:
        yield started


@pytest.fixture
def own_workers(library: Path, tmp_path: Path) -> Iterator[GpuWorkers]:
    """With slow copies, so that what happens in the middle happens while one is under way."""
    with gpu_workers("AB", library, tmp_path, slow_microseconds=20_000) as started:
        yield started


def opened(workers: GpuWorkers, program: Program, library: Path) -> Pipeline:
    blob = library.with_name("blob")
    return Pipeline.open(program, workers.endpoints, lambda sha256: blob, timeout_seconds=30, links=ALL_IPC)


def batches(program: Program, count: int) -> list[list[np.ndarray]]:
    return [[np.array([n, 7 * n + i]) for i in range(len(program.inputs))] for n in range(count)]


def chain() -> Program:
    """A to B and back: either worker sends and receives."""
    tensors = [TensorSpec(f"t{place}", (2,), "int64") for place in range(4)]
    stages = tuple(
        StageSpec(place, f"s{place}", machine, (), "cpu", BLOB, (), (tensors[place],), (tensors[place + 1],))
        for place, machine in enumerate("ABA")
    )
    return Program((tensors[0],), (tensors[-1],), stages)


def carried(pipeline: Pipeline) -> set[str]:
    return {link.transport for link in pipeline.links() if "client" not in (link.source, link.destination)}


def is_empty(workers: GpuWorkers, name: str) -> bool:
    return bool(wait_for(lambda: workers.areas(name) == 0)) and not deployments_left(workers.endpoints[name])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(most_replicas=2, machines="AB", blob=BLOB), count=st.sampled_from([1, 12]))
def test_any_program_from_gpu_to_gpu(program: Program, count: int, workers: GpuWorkers, library: Path) -> None:
    fed = batches(program, count)
    with opened(workers, program, library) as pipeline:
        assert carried(pipeline) <= {Transport.CUDA_IPC}
        results = list(pipeline.stream(fed))
    for batch, result in zip(fed, results, strict=True):
        expected = evaluate(program, batch)
        assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))


def test_links_are_from_gpu_to_gpu_and_nothing_stays_when_they_are_closed(workers: GpuWorkers, library: Path) -> None:
    with opened(workers, chain(), library) as pipeline:
        pipeline.run(batches(chain(), 1)[0])
    assert all(is_empty(workers, name) for name in "AB")
    files = {name: workers.files(name) for name in "AB"}
    for moment in (0.0, 0.01, 0.05):
        pipeline = opened(workers, chain(), library)
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
    with opened(own_workers, chain(), library) as pipeline:
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
    with opened(own_workers, chain(), library) as pipeline:
        next(pipeline.stream(batches(chain(), 100)))
    assert all(is_empty(own_workers, name) for name in "AB")


def test_memory_stays_until_a_sender_that_stands_still_has_let_go(own_workers: GpuWorkers, library: Path) -> None:
    """Freed before, it could be written into when the sender goes on, and be another's by then."""
    tensors = [TensorSpec(f"t{place}", (2,), "int64") for place in range(3)]
    stages = tuple(
        StageSpec(place, f"s{place}", machine, (), "cpu", BLOB, (), (tensors[place],), (tensors[place + 1],))
        for place, machine in enumerate("AB")
    )
    program = Program((tensors[0],), (tensors[-1],), stages)
    with opened(own_workers, program, library) as pipeline:
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
    with opened(own_workers, program, library) as pipeline:
        assert np.array_equal(pipeline.run([np.array([1, 2])]), evaluate(program, [np.array([1, 2])]))


def test_what_cannot_be_opened_is_shared_through_the_host_and_that_is_said(library: Path, tmp_path: Path) -> None:
    """As between containers, or GPUs that cannot reach each other."""
    with gpu_workers("AB", library, tmp_path, refused=217) as workers:
        with opened(workers, chain(), library) as pipeline:
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
