"""The page of a running deployment, this client's or a lab's. Events are read only when a browser requests the page."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rpc_runtime.client.bystander import Bystander, RunningDeployment, chosen, running_on
from rpc_runtime.client.worker_client import WorkerDescription, answering
from rpc_runtime.errors import DeadlineError, TvmSplitError, WorkerUnavailableError
from rpc_runtime.program.events import DEPLOYMENT, FAILURE, HAPPENINGS, LINK_ENDED, Observation, Track, now
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.launcher import AskedMachine
from tvm_split.dashboard.state import (
    ENDED,
    FAILED,
    IDLE,
    LOST,
    RUNNING,
    WAITING,
    Live,
    Page,
    ShownMachine,
    page_of,
    reported,
)
from tvm_split.observing.about import About, about_in
from tvm_split.observing.recording import Observed
from tvm_split.observing.summary import Results, results_of
from tvm_split.observing.trace import MachineTrace, Trace, joined, trace_of

REFRESH_SECONDS = 2.0
WINDOW_SECONDS = 10.0
"""Shares, limits and the timeline are those of the latest events of so long a time, or of fewer seconds that have
`WINDOW_ROWS` of a machine: ten seconds of 1,800 micro-batches a second took a third of a core."""
WINDOW_ROWS = 4096
NOTED = 100
"""The latest events of the page's own that are kept."""
HISTORY_SECONDS = 600.0
"""The chart of results reaches back so far."""
IDLE_SECONDS = 3.0
"""After so long without a result, and longer than the latest ones took, nothing is streamed."""
DESCRIBE_SECONDS = 10.0
"""Time between two questions for what changes slowly, such as free memory."""


class LivePage:
    """The page of a deployment. Thread-safe; for any number of viewers, machines are asked once per `REFRESH_SECONDS`.

    Args:
        endpoints: the workers, which are asked for their descriptions; empty if all stages run in this process.
        trouble: returns `FAILED` or `RECOVERING`, and the reason; two empty texts while all is well. None: what the
            machines have recorded says it.

    Attributes:
        has_ended: whether no machine holds the deployment any more; `page` finds out.
    """

    def __init__(
        self,
        model: str,
        observed: Observed,
        about: Callable[[], About],
        endpoints: Mapping[str, WorkerEndpoint],
        trouble: Callable[[], tuple[str, str]] | None = None,
    ) -> None:
        self._model, self._observed, self._about = model, observed, about
        self._endpoints, self._trouble = endpoints, trouble
        self._lock = threading.Lock()
        self._seen: dict[str, Observation] = {}
        self._results = Results(np.zeros(0, np.int64), np.zeros((0, 2), np.int64))
        self._begin: int | None = None
        self._noted: deque[tuple[int, str]] = deque(maxlen=NOTED)
        self._gone: set[str] = set()
        self._workers: Mapping[str, WorkerDescription] = {}
        self._processor: dict[str, float] = {}
        self._page: Page | None = None
        self.has_ended = False
        self._read_at = self._described_at = -np.inf

    def go_on(self, earlier: LivePage) -> None:
        """Show after what ``earlier`` has shown until its deployment ended; numbers of micro-batches begin anew."""
        sequences, spans = earlier._results
        self._results = Results(sequences - sequences.max(initial=0) - 1, spans)
        self._noted, self._begin = earlier._noted, earlier._begin
        why = earlier._page.reason if earlier._page is not None else ""
        self._noted.append((now(), f"goes on after: {why.partition('. ')[0]}"))

    def page(self) -> Page:
        """Return the page at this moment, at most `REFRESH_SECONDS` old."""
        with self._lock:
            if self._page is None or time.monotonic() - self._read_at > 0.9 * REFRESH_SECONDS:
                self._page = self._read()
                self._read_at = time.monotonic()
            return self._page

    def _read(self) -> Page:
        state, reason = RUNNING, ""
        try:
            refused: dict[str, str] = {}
            known = {machine: seen.newest for machine, seen in self._seen.items()}
            self._take(self._observed.observe(known, refused=refused), refused)
            if time.monotonic() - self._described_at > DESCRIBE_SECONDS:
                own = self._observed.machines
                self._workers = answering({name: end for name, end in self._endpoints.items() if name in own})
                self._described_at = time.monotonic()
        except (WorkerUnavailableError, DeadlineError) as error:  # they may answer again
            state, reason = LOST, str(error)
            self._take({}, {})
        except TvmSplitError as error:
            state, reason, self.has_ended = ENDED, str(error), True
        trace = trace_of(self._model, self._seen, self._observed.clocks(), self._about())
        links = bool(self._gone) and not self.has_ended
        trouble = _failure_in(trace, links) if self._trouble is None else self._trouble()
        state, reason = trouble if trouble[0] else (state, reason)
        if len(trace) and self._begin is None:
            self._begin = trace.begin
        self._add_results(results_of(trace))
        if state == RUNNING and self._is_idle():
            last = " This is what was last." if len(self._results.spans) else ""
            state, reason = IDLE, f"Nothing is streamed now.{last}"
        live = Live(state, reason, self._gone, self._workers, self._processor)
        return page_of(_latest(trace), live, self._results.spans, self._noted, self._begin, REFRESH_SECONDS)

    def _take(self, news: Mapping[str, Observation], refused: Mapping[str, str]) -> None:
        machines = self._observed.machines
        for machine in machines:
            if machine not in news and machine not in self._gone:
                self._noted.append((now(), f"{machine}: {refused.get(machine, 'does not answer')}"))
                self._gone.add(machine)
            elif machine in news and machine in self._gone:
                self._noted.append((now(), f"{machine}: answers again"))
                self._gone.discard(machine)
        self._gone.intersection_update(machines)  # others have left the deployment
        self._seen = {machine: seen for machine, seen in self._seen.items() if machine in (*machines, CLIENT)}
        for machine, new in news.items():
            if machine not in (*machines, CLIENT):
                continue
            before = self._seen.get(machine)
            if before is not None:
                passed = max(new.clock_nanoseconds - before.clock_nanoseconds, 1)
                self._processor[machine] = max(new.processor_seconds - before.processor_seconds, 0.0) / (passed * 1e-9)
                new = joined([before, new])
            self._seen[machine] = _shortened(new)

    def _add_results(self, found: Results) -> None:
        is_new = np.isin(found.sequences, self._results.sequences, invert=True)
        sequences = np.concatenate([self._results.sequences, found.sequences[is_new]])
        spans = np.concatenate([self._results.spans, found.spans[is_new]])
        order = np.argsort(spans[:, 1], kind="stable")
        kept = order[spans[order, 1] > spans[:, 1].max(initial=0) - HISTORY_SECONDS * 1e9]
        self._results = Results(sequences[kept], spans[kept])

    def _is_idle(self) -> bool:
        latest = self._results.spans[-10:]
        if not len(latest):
            return True
        usual = float((latest[:, 1] - latest[:, 0]).max()) * 1e-9
        return (now() - int(latest[-1, 1])) * 1e-9 > max(IDLE_SECONDS, 2 * usual)


def _shortened(seen: Observation) -> Observation:
    """Return a machine's observation with only its latest rows and all events of the deployment itself."""
    rows = seen.table()
    always = np.flatnonzero(np.isin(rows["track"], _of_deployment(seen.tracks)))
    latest = np.arange(max(len(rows) - WINDOW_ROWS, 0), len(rows))
    return replace(seen, rows=rows[np.union1d(always, latest)].tobytes())


def _latest(trace: Trace) -> Trace:
    """Return the latest part of a trace, from the same time for all machines; events of the deployment all stay."""
    machines = [machine for machine in trace.machines.values() if len(machine.rows)]
    begin = max((int(machine.ends.max()) for machine in machines), default=0) - int(WINDOW_SECONDS * 1e9)
    begin = max([begin, *(int(one.ends[-WINDOW_ROWS]) for one in machines if len(one.rows) >= WINDOW_ROWS)])

    def shown(machine: MachineTrace) -> MachineTrace:
        always = np.isin(machine.rows["track"], _of_deployment(machine.tracks))
        return replace(machine, rows=machine.rows[always | (machine.ends > begin)])

    return replace(trace, machines={name: shown(machine) for name, machine in trace.machines.items()})


def _of_deployment(tracks: Sequence[Track]) -> list[int]:
    return [number for number, track in enumerate(tracks) if track.kind in HAPPENINGS]


def _failure_in(trace: Trace, links: bool) -> tuple[str, str]:
    """Return `FAILED`, and the text of the first event of a failure, or with ``links`` of a link's end."""
    details = [event.detail for event in trace.of_kind(DEPLOYMENT)]
    prefixes = (FAILURE, LINK_ENDED) if links else (FAILURE,)
    return next(((FAILED, detail) for detail in details if detail.startswith(prefixes)), ("", ""))


SEARCH_SECONDS = 2.0
"""Time between two questions for a deployment."""


class LabPage:
    """The page of a deployment that another process runs. When the deployment has ended, the next one is searched for.

    If that is of the same model and owner, the page goes on: stages were moved, or the model was deployed again.

    Args:
        ask: asks all workers of the lab.
        deployment: the deployment's name (letters, as ``tvm-split status`` shows them) or model; None for the only one.
    """

    def __init__(self, ask: Callable[[], Sequence[AskedMachine]], deployment: str | None) -> None:
        self._ask, self._deployment = ask, deployment
        self._lock = threading.Lock()
        self._bystander: Bystander | None = None
        self._live: LivePage | None = None
        self._left: LivePage | None = None
        self._found = "", ""
        self._last = Page(deployment or "", WAITING, refresh_seconds=REFRESH_SECONDS)
        self._asked_at = float("-inf")

    def page(self) -> Page:
        with self._lock:
            if self._live is not None:
                self._last = self._live.page()
                if self._live.has_ended:
                    self._leave()
            elif time.monotonic() - self._asked_at > SEARCH_SECONDS:
                self._find()
                self._asked_at = time.monotonic()
            return self._last

    def _find(self) -> None:
        answers: Sequence[AskedMachine] = ()
        running: list[RunningDeployment] = []
        try:
            answers = self._ask()
            running = running_on({answer.name: answer.worker for answer in answers if answer.worker is not None})
            found = chosen(running, self._deployment)
            endpoints = {answer.name: answer.endpoint for answer in answers if answer.name in found.machines}
            self._bystander = Bystander(endpoints, found)
            about = about_in(self._bystander.about().values())
        except TvmSplitError as error:
            self._leave()
            # What ended stays to be seen until the next one runs.
            if self._last.state not in (ENDED, FAILED) or running:
                self._last = _waiting(answers, str(error))
            return
        self._live = LivePage(found.model, self._bystander, lambda: about, endpoints)
        if self._left is not None and (found.model, found.owner) == self._found:
            self._live.go_on(self._left)
        self._found = found.model, found.owner
        if self._deployment == found.name:  # stages that are moved are deployed under another name
            self._deployment = found.model or found.name
        self._last = self._live.page()

    def _leave(self) -> None:
        if self._bystander is not None:
            self._bystander.close()
        self._left = self._live or self._left
        self._bystander = self._live = None


def _waiting(answers: Sequence[AskedMachine], reason: str) -> Page:
    """Return a page without a deployment, which shows the workers and the ``reason`` why there is none."""
    machines = (
        ShownMachine(answer.name, answers=answer.worker is not None, **reported(answer.worker)) for answer in answers
    )
    limit = "Waiting for a deployment."
    return Page("tvm-split", WAITING, reason, limit, machines=tuple(machines), refresh_seconds=SEARCH_SECONDS)
