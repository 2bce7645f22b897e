"""Worker processes that all tests of this folder share; tests that break workers start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc_runtime.local_workers import LocalWorkers
from tests.rpc_runtime.program_maker import ProgramMaker

MACHINES = ("machine-a", "machine-b", "machine-c")


@pytest.fixture(scope="session")
def workers() -> Iterator[LocalWorkers]:
    with LocalWorkers(MACHINES) as started:
        yield started


@pytest.fixture
def maker(tmp_path: Path) -> ProgramMaker:
    return ProgramMaker(tmp_path / "blobs")
