"""Reference outputs of the source framework, with which the compiled network is compared.

References of files and bytes are computed in a child process, since a file can make a framework crash, hang or use all
memory. Then only the child ends, and the caller gets an error. The child is `python -m tvm_split.frontends.reference`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rpc_runtime.processes import reap
from rpc_runtime.program.specs import Array
from tvm_split.errors import ReferenceFailedError, last_line

if TYPE_CHECKING:
    from tvm_split.model import Reference

TIMEOUT_SECONDS = 900.0
"""Timeout for the next array from the child: an output, or the value of a layer."""

_IDLE_SECONDS = 60.0
"""A child without requests for this long ends to free its memory; the next request starts another one."""


@dataclass(frozen=True)
class Arranged:
    """Wrap ``reference``: transpose its values to the order of axes of the module's variables."""

    reference: Reference
    orders: Mapping[str, tuple[int, ...]]

    def outputs(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        return self.reference.outputs(inputs)

    def precise(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        reference: Any = self.reference  # not every one has this method
        return tuple(reference.precise(inputs))

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        for variable, value in self.reference.values(inputs):
            yield variable, np.array(value.transpose(self.orders[variable]), order="C")


@dataclass(frozen=True)
class InChildProcess:
    """Wrap a picklable ``reference`` so that a child process computes its arrays.

    Raises ReferenceFailedError if the child crashes, gives no answer for ``timeout_seconds``, or needs more than
    ``memory_bytes`` (default: 90 % of the memory that is available when it starts).
    """

    reference: Reference
    timeout_seconds: float = TIMEOUT_SECONDS
    memory_bytes: int | None = None

    def outputs(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(array for _, array in self._asked("outputs", inputs))

    def precise(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(array for _, array in self._asked("precise", inputs))

    def values(self, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        return self._asked("values", inputs)

    def _asked(self, method: str, inputs: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        child = _idle_child(self.memory_bytes)
        if child is None or not child.accepts(self, method, inputs):
            child = _started(self.memory_bytes)
            child.accepts(self, method, inputs)
        try:
            yield from child.answers(self.timeout_seconds)
        except BaseException:  # includes the end of an iteration (GeneratorExit): unread answers may be in the pipe
            child.end()
            raise
        _IDLE.append(child)


@dataclass
class _Child:
    """A child process that serves one reference at a time; ``holds`` is the reference that it received last."""

    process: subprocess.Popen[bytes]
    connection: Connection
    memory_bytes: int | None
    holds: weakref.ref[Reference] | None = None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def accepts(self, asking: InChildProcess, method: str, inputs: Sequence[Array]) -> bool:
        """Send a request, and return whether the child began to read it; end the child if not.

        An idle child may end at any moment: the system kills it first if memory is short.
        """
        is_known = self.holds is not None and self.holds() is asking.reference
        try:
            self.connection.send((None if is_known else asking.reference, method, list(inputs)))
            self.holds = weakref.ref(asking.reference)
            if self.connection.poll(asking.timeout_seconds) and self.connection.recv() == _ACCEPTED:
                return True
        except (EOFError, OSError):
            pass
        self.end()
        return False

    def answers(self, timeout_seconds: float) -> Iterator[tuple[str, Array]]:
        """Yield the names and arrays of the answer to the request that the child accepted."""
        try:
            while True:
                if not self.connection.poll(timeout_seconds):
                    raise _failed(f"gave no answer within {timeout_seconds:g} s")
                name, answer = self.connection.recv()
                if isinstance(answer, Exception):
                    raise answer
                if answer is None:
                    return
                yield name, answer
        except (EOFError, OSError) as error:
            raise _failed(f"ended with {_ending(self.process.wait())}") from error


_IDLE: list[_Child] = []
_ACCEPTED = "accepted"
"""The child's first answer to each request, before it reads the request."""


def _idle_child(memory_bytes: int | None) -> _Child | None:
    """Return an idle child with this memory limit, or None; end all other idle children on the way."""
    while True:
        try:
            child = _IDLE.pop()
        except IndexError:  # also if another thread takes the last one
            return None
        if child.memory_bytes == memory_bytes and child.process.poll() is None and not child.connection.poll():
            return child
        child.end()


def _started(memory_bytes: int | None) -> _Child:
    connection, child_connection = Pipe()
    # -P: modules of the current folder do not stand in for installed ones.
    command = [
        sys.executable,
        "-P",
        "-m",
        "tvm_split.frontends.reference",
        str(child_connection.fileno()),
        str(memory_bytes or 0),
    ]
    process = subprocess.Popen(  # noqa: S603
        command,
        pass_fds=[child_connection.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    child_connection.close()
    reap(process)
    return _Child(process, connection, memory_bytes)


def _failed(what: str) -> ReferenceFailedError:
    return ReferenceFailedError(
        f"the source framework's own run of this model, in a process of its own, {what}: there is nothing to compare "
        "with; verify=False, or --no-verify, compiles it unchecked"
    )


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _answer(connection: Connection) -> None:
    """Serve requests until the parent ends or sends none for `_IDLE_SECONDS`."""
    reference: Any = None
    while connection.poll(_IDLE_SECONDS):
        try:
            connection.send(_ACCEPTED)
            new_reference, method, inputs = connection.recv()
            reference = new_reference or reference
            if method == "values":
                for variable, value in reference.values(inputs):
                    connection.send((variable, value))
            else:
                for output in getattr(reference, method)(inputs):
                    connection.send(("", output))
            connection.send(("", None))
        except (EOFError, OSError):
            return
        except MemoryError:
            connection.send(("", _failed("needs more memory than there is")))
        except Exception as error:
            connection.send(("", _failed(f"failed ({type(error).__name__}: {last_line(error)})")))


def _limit_memory(limit_bytes: int) -> None:
    """Limit this process's memory, and make the system end this process first if memory is short."""
    import resource

    from rpc_runtime.hardware import available_memory_bytes

    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    limit = limit_bytes or int(0.9 * available_memory_bytes())
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    _limit_memory(int(sys.argv[2]))
    _answer(Connection(int(sys.argv[1])))
