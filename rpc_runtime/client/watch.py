"""Watches all workers of a deployment, and finds the root cause of a failure.

A failure spreads: if one worker dies, its neighbours see broken links and stop, and then their neighbours do, too. So
reports are collected and classified. A stage that raised, a protocol violation and an ended worker are causes. A broken
link is only a symptom, unless every worker has shown since then that it is alive.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc

from rpc_runtime.client.worker_client import WorkerClient, describe
from rpc_runtime.errors import ProtocolError, StageError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.hardware import load_per_core
from rpc_runtime.program.round_robin import Recurrence
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.liveness import USUAL_WATCH, MeasuredLiveness, WatchTimeouts
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import details_of, error_of
from rpc_runtime.wire.text import clean_message

logger = logging.getLogger(__name__)

CAUSE_SECONDS = 0.5
"""How long a failed call waits for a report, which may name the cause."""


class ReportKind(enum.IntEnum):
    """Kinds of reports, the likeliest cause first; a LINK is a symptom."""

    STAGE = enum.auto()
    PROTOCOL = enum.auto()
    INTERNAL = enum.auto()
    GONE = enum.auto()
    LINK = enum.auto()


@dataclass(frozen=True)
class Report:
    """A problem that ``machine`` has reported; GONE: ``machine`` itself has ended; LINK: its link to ``peer`` broke."""

    kind: ReportKind
    machine: str
    message: str
    peer: str = ""


@dataclass(frozen=True)
class Failure:
    """The root cause of a failure, and the error that says so.

    ``machine`` has ended (GONE), has lost its link to ``peer`` (LINK), or has reported the problem.
    """

    kind: ReportKind
    machine: str
    peer: str
    error: TvmSplitError


_KIND_OF = {
    pb.Failure.STAGE: ReportKind.STAGE,
    pb.Failure.LINK: ReportKind.LINK,
    pb.Failure.PROTOCOL: ReportKind.PROTOCOL,
}
_ERRORS: dict[ReportKind, type[TvmSplitError]] = {
    ReportKind.STAGE: StageError,
    ReportKind.PROTOCOL: ProtocolError,
    ReportKind.INTERNAL: WorkerError,
}


def root_cause(reports: Sequence[Report], all_alive: bool) -> Report | None:
    """Return the report of the root cause, or None while it is not known.

    ``all_alive``: every worker has sent an event since the first report.
    """
    cause = min(reports, key=lambda report: report.kind, default=None)
    if cause is None or cause.kind is not ReportKind.LINK:
        return cause
    return _broken_first(reports) if all_alive else None


def _broken_first(reports: Sequence[Report]) -> Report:
    """Return the report of the link that broke first.

    A machine that loses a link closes all its links; the machines at their other ends then report that machine.
    """
    first_of = {report.machine: report for report in reversed(reports)}
    report, seen = reports[0], {reports[0].machine}
    while (earlier := first_of.get(report.peer)) and earlier.peer != report.machine and earlier.machine not in seen:
        report = earlier
        seen.add(report.machine)
    return report


class WorkerWatch:
    """Keeps the Watch streams of a deployment open.

    Calls ``on_failure`` once with the root cause, and ``on_activity`` if a worker's activity has changed. Silence is a
    suspicion: a silent worker is asked on a new connection, and has ended only if it does not answer.

    ``model`` is the deployment's name for `WorkerClient.describe`, ``about`` is for `WorkerClient.about`. ``stages``
    are those of each machine, with the micro-batches that they compute. ``results`` returns how many micro-batches
    every stage has computed. ``on_draining`` is called with each event of a worker that drains; without it, workers do
    not expect that their stages are moved away.
    """

    def __init__(
        self,
        connections: Mapping[str, WorkerClient],
        on_failure: Callable[[Failure], None],
        *,
        on_activity: Callable[[], None] = lambda: None,
        model: str = "",
        about: bytes = b"",
        stages: Mapping[str, Mapping[str, Recurrence]] = MappingProxyType({}),
        results: Callable[[], int] = lambda: 0,
        timeouts: WatchTimeouts = USUAL_WATCH,
        on_draining: Callable[[str], None] | None = None,
    ) -> None:
        self._beat_seconds = timeouts.beat_seconds
        self._timeouts = timeouts
        self._connections = connections
        self._request = {"model": model, "about": about, "moves": on_draining is not None}
        self._stages = stages
        self._results = results
        self._on_failure = on_failure
        self._on_activity = on_activity
        self._on_draining = on_draining
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._heard: dict[str, float] = {}
        self._lives = {machine: MeasuredLiveness(timeouts.of(machine)) for machine in connections}
        self._asked: set[str] = set()
        """The silent machines that are being asked."""
        self._activity: dict[str, int] = {}
        self._finished: dict[tuple[str, str], int] = {}
        self._reports: list[Report] = []
        self._first_report = 0.0
        self._cause: Failure | None = None
        self._closed = False
        self._calls: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Open the streams and wait until every worker has answered.

        Raises:
            TvmSplitError: a worker refused, cannot be reached, or is silent.
        """
        for machine, connection in self._connections.items():
            self._lives[machine].hear(load_per_core())  # its own is not known yet; often this is the same host
            self._calls[machine] = connection.watch(self._beat_seconds, **self._request)
            self._begin(self._read, machine)
        self._begin(self._judge)
        with self._lock:
            self._changed.wait_for(lambda: self._reports or len(self._heard) == len(self._connections))
            if self._reports:
                raise self._error(self._reports[0])

    def _begin(self, target: Callable[..., None], *arguments: str) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"watch-{'-'.join(arguments)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def link_broken(self, peer: str, error: TvmSplitError) -> None:
        """Report that the client's own data stream to ``peer`` broke."""
        kind = ReportKind.PROTOCOL if isinstance(error, ProtocolError) else ReportKind.LINK
        self._report(Report(kind, CLIENT, str(error), peer))

    def cause_of(self, error: TvmSplitError) -> TvmSplitError:
        """Wait shortly for reports after a call failed with ``error``; return the root cause, else ``error``."""
        # By then each worker has sent an event or counts as dead.
        silence_seconds = max((life.limit_seconds for life in self._lives.values()), default=0.0)
        verdict_seconds = silence_seconds + self._timeouts.answer_seconds + 2 * self._beat_seconds
        with self._lock:
            if self._changed.wait_for(lambda: self._reports, CAUSE_SECONDS):
                self._changed.wait_for(lambda: self._cause is not None, verdict_seconds)
            return error if self._cause is None else self._cause.error

    def require_usable(self) -> None:
        """Raise the root cause if there is one."""
        with self._lock:
            if self._cause is not None:
                raise self._cause.error

    def finished(self) -> dict[tuple[str, str], int]:
        """Return the known number of computed micro-batches by (machine, stage name)."""
        with self._lock:
            return dict(self._finished)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for call in self._calls.values():
            call.cancel()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _read(self, machine: str) -> None:
        endpoint = self._connections[machine].endpoint
        try:
            for event in self._calls[machine]:
                self._take(machine, clean_message(event))
            message = f"{endpoint} ended the deployment"
        except grpc.RpcError as status:
            error = error_of(status, endpoint)
            if not isinstance(error, WorkerUnavailableError):
                self._report(Report(ReportKind.INTERNAL, machine, str(error)))
                return
            message = f"{endpoint} has gone: {details_of(status)}"
        self._report(Report(ReportKind.GONE, machine, message))

    def _take(self, machine: str, event: pb.WatchEvent) -> None:
        with self._lock:
            moved = event.activity != self._activity.get(machine, 0)
            self._activity[machine] = event.activity
            self._heard[machine] = time.monotonic()
            self._lives[machine].hear(event.load)
            for stage in event.stages:
                self._finished[machine, stage.stage] = stage.finished
            self._changed.notify_all()
        if event.draining and self._on_draining is not None:
            self._on_draining(machine)
        if event.HasField("failure"):
            failure = event.failure
            kind = _KIND_OF.get(failure.kind, ReportKind.INTERNAL)
            self._report(Report(kind, machine, failure.message, failure.peer))
        elif moved:
            self._on_activity()

    def _report(self, report: Report) -> None:
        with self._lock:
            if self._closed:
                return
            if not self._reports:
                self._first_report = time.monotonic()
            self._reports.append(report)
            self._changed.notify_all()

    def _judge(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                sure = self._first_report + self._beat_seconds  # later events were sent after the first report
                cause = root_cause(self._reports, all(at > sure for at in self._heard.values()))
                if cause is not None:
                    failure = Failure(cause.kind, cause.machine, cause.peer, self._error(cause))
                    self._cause = failure
                    self._changed.notify_all()
                    break
                since = time.monotonic()
                self._changed.wait(self._beat_seconds / 2)
                silent = [machine for machine, life in self._lives.items() if life.is_silent(since)]
                silent = [machine for machine in silent if machine not in self._asked]
                self._asked.update(silent)
            for machine in silent:
                self._begin(self._ask, machine)
        self._on_failure(failure)

    def _ask(self, machine: str) -> None:
        """Ask a silent worker on a new connection; report that it has gone if it does not answer."""
        life, endpoint, asked = self._lives[machine], self._connections[machine].endpoint, time.monotonic()
        try:
            describe(endpoint, max(self._timeouts.answer_seconds, life.longest_gap_seconds))
            is_alive = True
        except TvmSplitError:
            is_alive = False
        with self._lock:
            self._asked.discard(machine)
            seconds = life.silent_seconds
            is_alive = is_alive or seconds < time.monotonic() - asked  # or this process was stopped meanwhile
            if is_alive:
                life.hear()
        if is_alive:
            logger.info("%s was silent for %.3g seconds, and answers", endpoint, seconds)
        else:
            text = (
                f"{endpoint} has been silent for {seconds:.2g} seconds, and does not answer: it hangs, or the network"
            )
            self._report(Report(ReportKind.GONE, machine, f"{text} is gone"))

    def _held(self, machine: str) -> str:
        """Return the stages of an ended machine as text, each with a lower bound of its computed micro-batches."""
        results = self._results()
        texts = []
        for name, micro_batches in self._stages.get(machine, {}).items():
            count = max(self._finished.get((machine, name), 0), micro_batches.count_before(results))
            texts.append(f"{name!r} (at least {count} micro-batches done)" if count else repr(name))
        return ", ".join(texts)

    def _error(self, report: Report) -> TvmSplitError:
        if report.kind in _ERRORS:
            return _ERRORS[report.kind](report.message)
        if report.kind is ReportKind.GONE:
            held = self._held(report.machine)
            return WorkerUnavailableError(
                f"{report.message}. {f'It held the stages {held}. ' if held else ''}If the worker's output or its "
                "system's log says that it crashed, or was killed for its memory, the same stages would do it again: "
                "compile again for the machine's right target, or move layers to another machine. Else start it again "
                "and deploy again"
            )
        connection = self._connections.get(report.machine)
        name = str(connection.endpoint) if connection else "the client"
        return WorkerUnavailableError(
            f"{name} lost its connection to machine {report.peer!r}, though every worker answers the client: "
            f"{report.message}. Check the network between the two, and deploy again"
        )
