"""A slow machine on this host: a running worker gets half of its cores' time, busy processes get the other half.

A competitor of equal weight on each core is smoother than to stop and continue the worker (the system shares a core in
slices of some milliseconds), does not disturb its heartbeats, and needs no privileges.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

# It ends when its standard input does, so with the process that started it; the line says that it is running.
_BUSY = """\
import os, sys, threading
os.sched_setaffinity(0, {int(sys.argv[1])})
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print("busy", flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def half_speed(process: int, cores: Sequence[int]) -> Iterator[list[psutil.Process]]:
    """Pin all threads of a process to ``cores``, and yield the processes that take half of each core from it."""
    before = os.sched_getaffinity(process)
    _pin(process, set(cores))
    competitors: list[subprocess.Popen[str]] = []
    try:
        for core in cores:
            competitors.append(
                subprocess.Popen(
                    [sys.executable, "-c", _BUSY, str(core)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # where the system shares by session, a worker has one of its own
                )
            )
        for competitor in competitors:
            assert competitor.stdout is not None
            assert competitor.stdout.readline() == "busy\n"
        yield [psutil.Process(competitor.pid) for competitor in competitors]
    finally:
        for competitor in competitors:
            competitor.kill()
            competitor.communicate()
        with contextlib.suppress(ProcessLookupError):
            _pin(process, before)


def _pin(process: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may end at any time
            os.sched_setaffinity(int(thread.name), cores)
