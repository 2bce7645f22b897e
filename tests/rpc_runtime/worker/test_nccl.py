"""Two workers that exchange tensors by NCCL: a stand-in for it, on the stand-in for CUDA's runtime in each process.

It copies late and in halves, connects at the first transfer, and reports a dead peer as NCCL does. It ends a process
that has two transfers in flight, exceeds a communicator's limits, or uses an aborted communicator.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rpc_runtime.client.session import Session
from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from rpc_runtime.program.program import BlobSpec, Program, StageSpec, TensorSpec
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import LinkSetting
from tests.helpers.rpc_runtime.cuda_stand_in import compiled, compiled_nccl
from tests.helpers.rpc_runtime.gpu_worker import GpuWorkers, gpu_workers
from tests.helpers.rpc_runtime.joined_executors import evaluate
from tests.helpers.rpc_runtime.pipelines import deployments_left
from tests.helpers.rpc_runtime.random_programs import programs
from tests.helpers.waiting import eventually

Nccl = dict[str, str]
LIBRARY = b"no library: the stages are the tests' own"
BLOB = BlobSpec(hashlib.sha256(LIBRARY).hexdigest(), len(LIBRARY))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the stand-in for CUDA's runtime; the blob that all stages share is beside it."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "blob").write_bytes(LIBRARY)
    return compiled(folder)


def opened(workers: GpuWorkers, program: Program, library: Path) -> Session:
    links = {ends: LinkSetting(transport="nccl") for ends in itertools.permutations("ABC", 2)}
    return Session(program, workers.endpoints, lambda sha256: library.with_name("blob"), links=links)


def batches(program: Program, count: int) -> list[list[np.ndarray]]:
    return [[np.array([n, 7 * n + i]) for i in range(len(program.inputs))] for n in range(count)]


def chain(machines: str = "ABA") -> Program:
    """Return a chain of stages. By default from A to B and back, so that both workers send and receive."""
    tensors = [TensorSpec(f"t{place}", (2,), "int64") for place in range(len(machines) + 1)]
    stages = tuple(
        StageSpec(place, f"s{place}", machine, (), "cpu", BLOB, (), (tensors[place],), (tensors[place + 1],))
        for place, machine in enumerate(machines)
    )
    return Program((tensors[0],), (tensors[-1],), stages)


def is_empty(workers: GpuWorkers, name: str) -> bool:
    """Return whether a worker has freed everything of a deployment within the time limit."""
    eventually(lambda: workers.areas(name) == 0, "no memory of the GPU is left")
    return not deployments_left(workers.endpoints[name])


@pytest.fixture(scope="module")
def nccl(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Nccl:
    """Return the environment in which the loader finds it."""
    return {"LD_LIBRARY_PATH": str(compiled_nccl(library, tmp_path_factory.mktemp("nccl")).parent)}


@pytest.fixture(scope="module")
def workers(library: Path, nccl: Nccl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuWorkers]:
    with gpu_workers("ABC", library, tmp_path_factory.mktemp("workers"), environment=lambda name: nccl) as started:
        yield started


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(most_replicas=2, machines="ABC", blob=BLOB), count=st.sampled_from([1, 12]))
def test_any_program_by_nccl(program: Program, count: int, workers: GpuWorkers, library: Path) -> None:
    fed = batches(program, count)
    with opened(workers, program, library) as pipeline:
        assert {link.transport for link in pipeline.links() if CLIENT not in (link.source, link.destination)} <= {
            "nccl"
        }
        results = list(pipeline.stream(fed))
    assert all(is_empty(workers, name) for name in program.machines)
    for batch, result in zip(fed, results, strict=True):
        expected = evaluate(program, batch)
        assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_killed_worker_leaves_nothing_with_its_neighbour(library: Path, nccl: Nccl, tmp_path: Path) -> None:
    with gpu_workers("ABC", library, tmp_path, environment=lambda name: nccl) as workers:
        with opened(workers, chain(), library) as pipeline:
            results = pipeline.stream(batches(chain(), 1000))
            for _ in range(5):
                next(results)
            os.kill(workers.processes["A"].pid, signal.SIGKILL)
            with pytest.raises(WorkerUnavailableError, match="'A'"):
                list(results)
        assert is_empty(workers, "B")
        program = chain("BCB")  # its GPU is free for others
        with opened(workers, program, library) as pipeline:
            assert np.array_equal(pipeline.run([np.array([1, 2])]), evaluate(program, [np.array([1, 2])]))


@pytest.mark.parametrize(
    ("end", "variables", "message"),
    [
        ("A", {"LD_LIBRARY_PATH": ""}, "cannot be opened by nccl: NCCL's library, libnccl.so.2, is not found"),
        ("B", {"STAND_IN_NCCL": "22800"}, "the same NCCL, this one has 2.28.0, the other one 2.27.3"),
    ],
)
def test_ends_that_nccl_cannot_join_leave_nothing(
    end: str, variables: dict[str, str], message: str, library: Path, nccl: Nccl, tmp_path: Path
) -> None:
    with gpu_workers(
        "AB", library, tmp_path, environment=lambda name: nccl | (variables if name == end else {})
    ) as workers:
        with pytest.raises(WorkerError, match=message), opened(workers, chain("AB"), library):
            pass
        assert all(is_empty(workers, name) for name in "AB")
