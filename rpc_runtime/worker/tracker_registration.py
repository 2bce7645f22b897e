"""Registers a worker with TVM's RPC tracker while it runs, and offers it for tuning while it has no deployment."""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import IO

from rpc_runtime.errors import TvmSplitError, WorkerError
from rpc_runtime.processes import Closing, end_child, start_child
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.tracker import Code, Registration, State, TrackerConnection, TrackerEntry, information

logger = logging.getLogger(__name__)

PING_SECONDS = 2.0
RETRY_SECONDS = 2.0
"""Pause between attempts to reach a tracker: machines may be started before it."""
PAUSE_SECONDS = 10.0
"""Tuning runs many sessions and builds kernels in between; it counts as ended after this time without a session."""
END_SECONDS = 5.0


class TuningServer(Closing):
    """The process that serves TVM's RPC next to a worker.

    Raises:
        WorkerError: the process cannot listen on ``address``.
    """

    def __init__(self, entry: TrackerEntry, address: Address) -> None:
        try:
            self._listening = address.listen()
        except OSError as error:
            raise WorkerError(f"cannot listen on {address} for tuning: {error.strerror}") from error
        self.port = int(self._listening.getsockname()[1])
        self._entry = entry
        self._offered: bool | None = None
        self._is_busy = False
        self._last = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None

    def update(self, wanted: bool) -> bool:
        """Offer the machine for tuning if ``wanted``, else withdraw the offer; a running session continues.

        Restarts an ended process. Returns whether a session runs, or the last one ended less than `PAUSE_SECONDS` ago.
        """
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                code = self._process.returncode
                logger.warning("the process that serves TVM's RPC ended (%d); it is started again", code)
            self._process, self._offered, self._is_busy = self._started(), None, False
        requests: IO[bytes] = self._process.stdin  # type: ignore[assignment]
        words: IO[bytes] = self._process.stdout  # type: ignore[assignment]
        if wanted != self._offered:
            self._offered = wanted
            with contextlib.suppress(OSError):  # it has ended; its restart sends this again
                requests.write(b"offer\n" if wanted else b"withdraw\n")
                requests.flush()
        while wait([words.fileno()], 0) and (lines := os.read(words.fileno(), 4096).split()):
            self._is_busy, self._last = lines[-1] == b"session", time.monotonic()
        return self._is_busy or time.monotonic() - self._last < PAUSE_SECONDS

    def close(self) -> None:
        """End the process and its session. Idempotent."""
        if self._process is not None:
            end_child(self._process, END_SECONDS)
        self._listening.close()

    def _started(self) -> subprocess.Popen[bytes]:
        entry, descriptor = self._entry, self._listening.fileno()
        arguments = [f"--listening={descriptor}", f"--tracker={entry.tracker}", f"--key={entry.key}"]
        arguments += [f"--host={entry.host}"] if entry.host else []
        return start_child("worker.tuning_process", *arguments, pass_fds=(descriptor,))


class TrackerRegistration(Closing):
    """Keeps a worker and its state registered with a tracker, in a thread of its own.

    If the tracker cannot be reached, it logs a warning once and retries until `close`; the worker runs without it.

    Args:
        entry: the tracker, key and host.
        port: the worker's port for deployments.
        own: the worker's registration, whose ``state`` and ``tunes`` are set here.
        holds: returns whether the worker has deployments.
        tuning: where TVM's RPC listens; None: no tuning.

    Raises:
        WorkerError: the tuning port cannot be used.
    """

    def __init__(
        self,
        entry: TrackerEntry,
        port: int,
        own: Registration,
        holds: Callable[[], bool],
        tuning: Address | None,
    ) -> None:
        self._entry = entry
        self._port = port
        self._holds = holds
        self._wake = threading.Event()
        self._closed = False
        self._trouble = ""
        self._tuning = None if tuning is None else TuningServer(entry, tuning)
        self._own = replace(own, tunes=self._tuning is not None)
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    @property
    def tuning_port(self) -> int | None:
        return None if self._tuning is None else self._tuning.port

    def request_update(self) -> None:
        """Update the registration soon, because the worker's state may have changed."""
        self._wake.set()

    def close(self) -> None:
        """Remove the worker from the tracker's list. Idempotent."""
        self._closed = True
        self._wake.set()
        self._thread.join(END_SECONDS)
        if self._tuning is not None:
            self._tuning.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._stay_listed()
            except TvmSplitError as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    logger.warning("not registered: %s. This worker tries again every %g s", error, RETRY_SECONDS)
            self._wait(RETRY_SECONDS)

    def _stay_listed(self) -> None:
        listed: State | None = None
        with TrackerConnection(self._entry.tracker) as tracker:
            while not self._closed:
                state = self._state()
                if state != listed:
                    entry = information(self._entry.key, self._entry.host, self._port, replace(self._own, state=state))
                    tracker.tell(Code.UPDATE_INFO, entry)
                    if self._trouble:
                        logger.warning("registered with the tracker %s again", self._entry.tracker)
                    listed, self._trouble = state, ""
                else:
                    tracker.tell(Code.PING)
                self._wait(PING_SECONDS)

    def _state(self) -> State:
        holds = self._holds()
        if self._tuning is not None and self._tuning.update(not holds):
            return "tuning"
        return "deployed" if holds else "ready"

    def _wait(self, seconds: float) -> None:
        if not self._closed:
            self._wake.wait(seconds)
            self._wake.clear()
