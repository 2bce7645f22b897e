"""Worker processes that all tests of this folder share; tests that break workers start their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.worker_process import Start, start_worker
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers

MACHINES = ("machine-a", "machine-b", "machine-c")


@pytest.fixture(scope="session")
def workers() -> Iterator[LocalWorkers]:
    with LocalWorkers(MACHINES) as started:
        yield started


@pytest.fixture
def maker(tmp_path: Path) -> ProgramMaker:
    return ProgramMaker(tmp_path / "blobs")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker with arguments and variables; it is killed if the test leaves it running."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        started.append(start_worker(tmp_path / "cache", *arguments, **environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()
