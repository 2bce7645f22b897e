"""Helpers for this process and its children: closing, clean-up at exit, forks, commands of modules, its output."""

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, TextIO

from rpc_runtime.errors import WorkerError

_PR_SET_PDEATHSIG = 1
_LEFT: dict[Hashable, Callable[[], object]] = {}
os.register_at_fork(after_in_child=_LEFT.clear)  # the parent cleans up


class Closing(ABC):
    """A context manager that returns itself and calls `close` at the end."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def do_all(steps: Iterable[Callable[[], object]]) -> Exception | None:
    """Run all steps, even if some fail; return the first error, or None."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            first = first or error
    return first


@contextlib.contextmanager
def ending_after(seconds: float, end: Callable[..., object], *arguments: object) -> Iterator[None]:
    """Call ``end``, which ends what the body does, if the body takes longer than ``seconds``."""
    timer = threading.Timer(seconds, end, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def before_end(key: Hashable, clear: Callable[[], object]) -> None:
    """Register ``clear`` to be called when the process ends, unless `cleared` is called with ``key`` before."""
    _LEFT[key] = clear


def cleared(key: Hashable) -> None:
    _LEFT.pop(key, None)


@atexit.register
def clear_away() -> None:
    """Call all registered functions, the latest first; ignore their errors."""
    while _LEFT:
        with contextlib.suppress(Exception):
            _LEFT.popitem()[1]()


class OwnProcess:
    """Remembers the process in which it was made, to detect use in a fork."""

    def __init__(self) -> None:
        self._identifier = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether the calling process is the one that has made this object."""
        return os.getpid() == self._identifier

    def require(self) -> None:
        """Raise a `WorkerError` in a fork, which has only the forking thread, and locks that are never released."""
        if not self.is_this:
            raise WorkerError(
                "this pipeline belongs to the process that opened it, from which the calling one was forked: let that "
                "one run it, or open another one here"
            )


def module_command(module: str) -> list[str]:
    """Return the command that runs ``rpc_runtime.MODULE`` without importing from the current folder."""
    return [sys.executable, "-P", "-m", f"rpc_runtime.{module}"]


def module_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with ``variables`` and this package's folder first in PYTHONPATH."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, **variables}


def start_child(module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start ``rpc_runtime.MODULE`` with pipes as standard input and output, and one thread, so that it can fork.

    The module must end when its input ends, and then never outlives this process.
    """
    child = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [*module_command(module), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # One thread only: a second one (of numpy's BLAS) could hold a lock that a fork waits for.
        env=module_environment(OPENBLAS_NUM_THREADS="1"),
        pass_fds=pass_fds,
        start_new_session=True,
    )
    reap(child)
    return child


def reap(child: subprocess.Popen[bytes]) -> None:
    """Wait for a child in a thread of its own, so that none stays a zombie until somebody asks for its exit code."""
    threading.Thread(target=child.wait, name="reap", daemon=True).start()


def end_child(child: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """End a child by closing its input; kill it after ``timeout_seconds``."""
    if child.stdin is not None:
        with contextlib.suppress(OSError):
            child.stdin.close()
    try:
        child.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def take_stdout() -> TextIO:
    """Return a stream to standard output, and redirect descriptor 1 and ``sys.stdout`` to standard error.

    Libraries write to descriptor 1 from C, and children inherit it. Only the entry point of a process may call this,
    and only once: in another program's process, standard output belongs to that program.
    """
    if sys.stdout is None:  # closed by the parent process
        return Path(os.devnull).open("w", encoding="utf-8")
    sys.stdout.flush()
    results = os.fdopen(
        os.dup(1),
        "w",
        buffering=1 if sys.stdout.line_buffering else -1,
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
    )
    os.dup2(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return results


class ForkedChild:
    """A fork of this process that runs ``run`` and exits with the code that it returns, or with 0 if it raises.

    SIGALRM ends it after ``seconds`` (0: never). It dies with this process, writes no core file, and is the first
    victim of the OOM killer. Only a process with a single thread may fork so.
    """

    def __init__(self, run: Callable[[], int], seconds: float) -> None:
        parent = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            code = 0
            try:
                _keep_small(parent)
                signal.setitimer(signal.ITIMER_REAL, seconds)
                code = run()
            finally:
                os._exit(code)
        self.ended = os.pidfd_open(self._process)
        """A descriptor that can be read when the child has ended."""

    def end(self) -> int:
        """Kill the child, if it still runs, and its process group; return its exit code (negative: a signal)."""
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(OSError):
                kill(self._process, signal.SIGKILL)
        _, status = os.waitpid(self._process, 0)
        os.close(self.ended)
        return os.waitstatus_to_exitcode(status)


def _keep_small(parent: int) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
