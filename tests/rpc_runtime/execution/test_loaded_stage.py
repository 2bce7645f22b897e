"""A library that cannot be loaded: the message names what has to change."""

import subprocess
import sys

import numpy as np
import pytest

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.loaded_stage import load_library
from tests.helpers.empty_root import OUTSIDE, can_make_roots
from tests.helpers.rpc_runtime.worker_process import ROOT

CODE = """
import resource, socket
import numpy as np
from rpc_runtime.worker.runtime_alone import load_runtime
load_runtime()
from rpc_runtime.execution.loaded_stage import load_library
from rpc_runtime.transports.shared_memory import received_memory
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
socket.send_fds(left, [b"here is the memory"], [0])
{before}
for use in (lambda: load_library(np.zeros(8, np.uint8), "stage 'one'"), lambda: received_memory(right, [])):
    try:
        use()
    except Exception as error:
        print(error)
"""


def printed(before: str = "", within: tuple[str, ...] = ()) -> list[str]:
    command = [*within, sys.executable, "-c", CODE.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()


def test_no_file_descriptor_is_free() -> None:
    library, memory = printed("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))")
    assert "Too many open files. Raise the limit of open files (ulimit -n)" in library
    assert "Too many open files" in memory


def test_a_damaged_library() -> None:
    with pytest.raises(WorkerError, match=r"stage 'one': .*Give the machine its right target and compile again$"):
        load_library(np.zeros(8, np.uint8), "stage 'one'")


@pytest.mark.skipif(not can_make_roots(), reason="this process may not mount")
def test_a_machine_without_proc() -> None:
    hidden = (*OUTSIDE, "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc; exec "$@"', "sh")
    assert printed(within=hidden)[0].endswith("Mount /proc on this machine")
