"""Worker processes that all tests of this folder share; tests that break workers start their own."""

from __future__ import annotations

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
    """The library in the place of CUDA's runtime."""
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(stand_in: Path, tmp_path: Path) -> ctypes.CDLL:
    """It, with nothing in it of another test's."""
    return ctypes.CDLL(shutil.copy(stand_in, tmp_path / "own.so"))


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
