"""What the client of a scenario is to do, and what it got; and where all processes keep their files."""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rpc_runtime.files import CACHE_VARIABLE
from rpc_runtime.program.program import Program
from rpc_runtime.transports.transport import LinkSettings
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.worker_process import STATE_VARIABLE

MACHINES = ("machine-a", "machine-b", "machine-c", "machine-d")

FREED_SECONDS = 60.0
"""How long it may take until what belongs to a deployment is freed: connections that were cut end after 20 s."""

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Task:
    """What a client does: so many streams, and so many threads with single calls; ``holds``: with spare copies."""

    program: Program
    endpoints: Mapping[str, WorkerEndpoint]
    links: LinkSettings
    blobs: Path
    batches: Sequence[Arrays]
    expected: Sequence[Arrays]
    streams: int
    callers: int
    holds: bool
    timeout_seconds: float


@dataclass
class Outcome:
    """What one caller got: results by what was wrong with them, its error, its longest wait between two results."""

    fed: int = 0
    right: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    error: str = ""
    longest_pause: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def take(self, task: Task, number: int, result: Arrays) -> None:
        """Count the result for micro-batch ``number``."""
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - self._last)
        self._last = now
        expected = {offset: task.expected[(number + offset) % len(task.expected)] for offset in (0, -1, 1)}
        same = [offset for offset, outputs in expected.items() if equal(result, outputs)]
        if 0 in same:
            self.right += 1
        elif -1 in same:
            self.doubled += 1
        elif 1 in same:
            self.lost += 1
        else:
            self.wrong += 1


def equal(left: Arrays, right: Arrays) -> bool:
    """Return whether two results are equal to the bit."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(left, right, strict=True)
    )


def still_there(look: Callable[[], str]) -> str:
    """Wait until ``look()``, which returns what is not freed yet, returns nothing; return what it says in the end."""
    deadline = time.monotonic() + FREED_SECONDS
    while (text := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return text


def more_than(before: Counter[str], held: Counter[str], threads: int = 0) -> str:
    """Return what is held more than before, as text; ``threads`` more are no matter."""
    more = held - before - Counter({"threads": threads})
    return ", ".join(f"{count} more {name}" for name, count in more.items())


@contextmanager
def own_folders() -> Iterator[Path]:
    """Yield a folder in which this process, and those that it starts, keep all that they keep."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        os.environ.update(
            {CACHE_VARIABLE: f"{folder}/cache", STATE_VARIABLE: f"{folder}/state", "TMPDIR": str(temporary)}
        )
        tempfile.tempdir = None  # is read again
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
        os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # then, too, networks and disks are removed
        yield Path(folder)
