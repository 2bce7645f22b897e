"""A fixture of tests that start processes."""

import os
from collections.abc import Iterator

import psutil
import pytest

from tests.helpers.waiting import eventually


@pytest.fixture
def no_process_stays() -> Iterator[None]:
    """Fail if a test leaves a process running."""
    before = own_processes()
    yield
    eventually(lambda: own_processes() <= before, "no process is left")


def own_processes() -> set[int]:
    """Return the children of this process, and those that build or measure kernels, whose parents may be gone."""
    return {
        process.pid
        for process in psutil.process_iter(["ppid", "cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and (process.info["ppid"] == os.getpid() or "tuning_process" in " ".join(process.info["cmdline"] or ()))
    }
