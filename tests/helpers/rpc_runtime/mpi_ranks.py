"""A test session as rank 0 of an MPI world whose other ranks do what it says.

``mpiexec -n RANKS python -m tests.helpers.rpc_runtime.mpi_ranks FOLDER PYTEST-ARGUMENT…``, or `run_session`. Rank 1
hands back what it is sent, so that both ends of a link can be in the session and each message still passes between
processes. Every other rank becomes a ``link_peer`` once. What ``mpiexec`` starts is only the parent of a rank, and
stays until the session is over: it would end all others when one is killed.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpc_runtime.transports import mpi
from rpc_runtime.transports.transport import transport_named
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
SESSION, RELAY = 0, 1
PEERS_FROM = 2
PARENT_VARIABLE = "TVM_SPLIT_TEST_RANK"
PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 1e-3


def is_rank() -> bool:
    """Return whether this process is a rank of an MPI world."""
    return mpi_transport().world is not None


def mpi_transport() -> mpi.Mpi:
    """Return the MPI transport of this process."""
    transport = transport_named("mpi")
    assert isinstance(transport, mpi.Mpi)
    return transport


_orders: Any = None
_peers = iter(range(0))


def run_session(folder: Path, ranks: int, *arguments: str, seconds: float) -> tuple[Path, str]:
    """Run pytest as rank 0; return its report in JUnit's format, and the output of all ranks."""
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-m", "tests.helpers.rpc_runtime.mpi_ranks", str(folder)]
    report = folder / "report.xml"
    process = subprocess.Popen(
        [*command, "-p", "no:xdist", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        return report, process.communicate(timeout=seconds)[0]
    finally:
        process.terminate()  # mpiexec then ends the processes that it has started
        process.wait(PATIENCE_SECONDS)


@contextmanager
def through_relay() -> Iterator[None]:
    """Make both ends of a link send to the relay instead of to each other."""
    world = mpi_transport().world
    assert world is not None
    world.rank = RELAY
    try:
        yield
    finally:
        world.rank = SESSION


def start_peer(*words: str) -> int:
    """Start a ``link_peer`` in an unused rank; return its process id when it is ready."""
    rank, ready = next(_peers), bytearray(8)
    _orders.Send(json.dumps(words).encode(), rank)
    answer = _orders.Irecv(ready, rank)
    eventually(answer.Test, "the rank is ready")
    return int.from_bytes(ready, "little")


def _parent(folder: Path) -> None:
    """Run a rank in its own process; end it with the session, or with ``mpiexec``."""
    end_file, rank = folder / "over", int(os.environ["PMI_RANK"])
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.rpc_runtime.mpi_ranks", *sys.argv[1:]],
        close_fds=False,  # one of them leads to mpiexec
        env={**os.environ, PARENT_VARIABLE: str(rank)},
        preexec_fn=_end_with_parent,
        start_new_session=True,
    )
    while not end_file.exists():
        if child.poll() is not None and rank == SESSION:
            end_file.touch()
        time.sleep(0.05)
    child.kill()
    child.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank(arguments: list[str]) -> None:
    global _orders, _peers
    mpi_transport().start()
    world = mpi_transport().world
    assert world is not None
    from mpi4py import MPI

    _orders = MPI.COMM_WORLD.Dup()
    if world.rank == SESSION:
        import pytest

        _peers = iter(range(PEERS_FROM, _orders.size))
        code = pytest.main(arguments)
        world.close()
        os._exit(code)
    elif world.rank == RELAY:
        world.close()
        _relay(MPI)
    else:
        _serve_as_peer()


def _relay(mpi4py: Any) -> None:
    under_way: deque[Any] = deque()
    status = mpi4py.Status()
    while True:
        while under_way and under_way[0].Test():
            under_way.popleft()
        if not mpi4py.COMM_WORLD.Iprobe(SESSION, mpi4py.ANY_TAG, status):
            time.sleep(mpi.POLL_BUSY_SECONDS)
            continue
        content = bytearray(status.Get_count(mpi4py.BYTE))
        mpi4py.COMM_WORLD.Recv(content, SESSION, status.tag)
        under_way.append(mpi4py.COMM_WORLD.Isend(content, SESSION, status.tag))


def _serve_as_peer() -> None:
    from tests.helpers.rpc_runtime import link_peer

    while (order := _orders.Improbe(SESSION)) is None:
        time.sleep(10 * LOOK_SECONDS)
    content = bytearray(4096)
    order.Recv(content)
    words = json.loads(content.rstrip(b"\0"))
    link_peer.main(*words, ready=lambda: _orders.Send(os.getpid().to_bytes(8, "little"), SESSION))


if __name__ == "__main__":
    from tests.helpers.rpc_runtime import mpi_ranks  # the module that tests import, and not a second one

    if PARENT_VARIABLE in os.environ:
        mpi_ranks._rank(sys.argv[2:])
    else:
        mpi_ranks._parent(Path(sys.argv[1]))
