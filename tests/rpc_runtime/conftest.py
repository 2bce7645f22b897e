"""Worker processes shared by all tests of this folder; tests that break workers start their own."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers.rpc_runtime.cuda_stand_in import compiled
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.worker_process import Start, start_worker

MACHINES = ("machine-a", "machine-b", "machine-c")


@pytest.fixture(scope="session")
def workers() -> Iterator[LocalWorkers]:
    with LocalWorkers(MACHINES) as started:
        yield started


@pytest.fixture
def maker(tmp_path: Path) -> ProgramMaker:
    return ProgramMaker(tmp_path / "blobs")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that replaces CUDA's runtime."""
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(stand_in: Path, tmp_path: Path) -> ctypes.CDLL:
    """Return the library, without the state of other tests."""
    return ctypes.CDLL(shutil.copy(stand_in, tmp_path / "own.so"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a worker with arguments and variables; it is killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        started.append(start_worker(tmp_path / "cache", *arguments, **environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()
