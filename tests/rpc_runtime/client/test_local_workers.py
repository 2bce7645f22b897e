"""Local workers start, can be reached, and have ended afterwards, also after errors."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import DeadlineError, InputError, WorkerUnavailableError
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS, eventually


def test_they_end_even_when_stopped() -> None:
    with LocalWorkers(["left", "right"]) as workers:
        ids = workers.process_ids
        assert describe(workers.endpoints["right"], PATIENCE_SECONDS).machine == "right"
        os.kill(ids["left"], signal.SIGSTOP)
    assert not any(map(psutil.pid_exists, ids.values()))
    workers.close()


def test_names_that_begin_with_a_dash() -> None:
    with LocalWorkers(["-x", "--help"]) as workers:
        for name, endpoint in workers.endpoints.items():
            assert describe(endpoint, PATIENCE_SECONDS).machine == name


def test_one_that_ended_is_started_again() -> None:
    with LocalWorkers(["left", "right"]) as workers:
        before = workers.endpoints
        killed = workers.process_ids["left"]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(killed), "no zombie is left, though nobody has asked")
        assert workers.ended == ("left",)
        assert workers.restart("left") == workers.endpoints["left"] != before["left"]
        assert workers.ended == ()
        description = describe(workers.endpoints["left"], PATIENCE_SECONDS)
        assert (description.machine, description.process_id) == ("left", workers.process_ids["left"])
        assert workers.endpoints["right"] == before["right"]


def test_they_end_when_their_parent_is_killed() -> None:
    code = (
        "import time\nfrom rpc_runtime.client.local_workers import LocalWorkers\n"
        "workers = LocalWorkers(['a'])\nprint(workers.process_ids['a'], flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    eventually(lambda: not psutil.pid_exists(worker), "the worker has ended with its parent")


def test_a_worker_that_dies_at_the_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkerUnavailableError, match=r"worker 'a' ended with exit code 1.*cannot keep blobs"):
        LocalWorkers(["a"], cache=tmp_path / "file")


def test_a_worker_that_is_not_ready_in_time() -> None:
    with pytest.raises(DeadlineError, match=r"worker 'a' was not ready within 0.01 seconds"):
        LocalWorkers(["a"], start_timeout_seconds=0.01)


@pytest.mark.parametrize("names", [[], ["a", "a"], ["client"], [""]])
def test_names_are_checked(names: list[str]) -> None:
    with pytest.raises(InputError, match="names"):
        LocalWorkers(names)
