"""Two workers that exchange tensors by NCCL: a stand-in for it, on the stand-in for CUDA's runtime in each process.

It copies late and in halves, connects at the first transfer, and reports a dead peer as NCCL does. It ends a process
that has two transfers in flight, exceeds a communicator's limits, or uses an aborted communicator.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from rpc_runtime.program.program import Program
from tests.helpers.rpc_runtime.cuda_stand_in import compiled_nccl
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
from tests.helpers.rpc_runtime.random_programs import programs

Nccl = dict[str, str]
BY_NCCL = all_links("ABC", "nccl")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_with_blob(tmp_path_factory.mktemp("cuda"))


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
    with opened(workers, program, library, BY_NCCL) as pipeline:
        assert carried(pipeline) <= {"nccl"}
        results = list(pipeline.stream(fed))
    assert all(is_empty(workers, name) for name in program.machines)
    for batch, result in zip(fed, results, strict=True):
        expected = evaluate(program, batch)
        assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_killed_worker_leaves_nothing_with_its_neighbour(library: Path, nccl: Nccl, tmp_path: Path) -> None:
    with gpu_workers("ABC", library, tmp_path, environment=lambda name: nccl) as workers:
        with opened(workers, chain(), library, BY_NCCL) as pipeline:
            results = pipeline.stream(batches(chain(), 1000))
            for _ in range(5):
                next(results)
            os.kill(workers.processes["A"].pid, signal.SIGKILL)
            with pytest.raises(WorkerUnavailableError, match="'A'"):
                list(results)
        assert is_empty(workers, "B")
        program = chain("BCB")  # its GPU is free for others
        with opened(workers, program, library, BY_NCCL) as pipeline:
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
        with pytest.raises(WorkerError, match=message), opened(workers, chain("AB"), library, BY_NCCL):
            pass
        assert all(is_empty(workers, name) for name in "AB")
