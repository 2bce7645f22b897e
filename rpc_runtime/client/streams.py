"""Streams of micro-batches that share a pipeline: they take turns, and each gets its own results in its own order."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpc_runtime.client.result_queue import ResultQueue, array_slot
from rpc_runtime.errors import DeadlineError, InputError, TvmSplitError, WorkerError
from rpc_runtime.own_process import OwnProcess
from rpc_runtime.program.inputs import checked_inputs, flat_bytes, given_arrays
from rpc_runtime.program.interface import Array
from rpc_runtime.program.machine_plan import PlannedRoute, machine_plan
from rpc_runtime.program.program import CLIENT, Program
from rpc_runtime.transports.credit_window import MOST_MORE
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.links import IncomingLink, OutgoingLink
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts

logger = logging.getLogger(__name__)

UNDER_WAY_PER_LEAD = 4
"""Limits the micro-batches under way, times what a full pipeline holds and the most replicas of a stage: more than all
queues of a path can hold. Windows that far links have widened come on top, one for every link of the longest path."""


def most_under_way(program: Program) -> int:
    """So many micro-batches all queues of a pipeline together may hold."""
    replicas = max(map(len, program.replicas.values()), default=1)
    links = max(program.depths.values(), default=0) + 1
    return UNDER_WAY_PER_LEAD * program.results_lead * replicas + MOST_MORE * links


@dataclass(eq=False)
class _Stream:
    """One use of the pipeline: its micro-batches under way, by their numbers, and its results that nobody has taken.

    ``since`` is when it began to wait for something, in seconds of the monotonic clock.
    """

    pending: deque[int] = field(default_factory=deque)
    ready: deque[tuple[Array, ...]] = field(default_factory=deque)
    fed: bool = False
    error: BaseException | None = None
    over: bool = False
    since: float = field(default_factory=time.monotonic)


class Streams:
    """Feeds micro-batches into the links of the client, whose station this is, and hands out their results.

    Any number of threads may run and stream at a time. Whoever has one more micro-batch queues up, so with room for
    one, each goes once before any goes twice; who takes no results waits, and holds nobody up.

    ``waited_for`` says who has to move for a micro-batch to be done.
    """

    def __init__(
        self,
        program: Program,
        timeout_seconds: float,
        in_flight: int | None,
        waited_for: Callable[[int], str],
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
    ) -> None:
        if timeout_seconds <= 0:
            raise InputError(f"a timeout is longer than 0 seconds, got {timeout_seconds}")
        if in_flight is not None and in_flight < 1:
            raise InputError(f"at least one micro-batch has to be in flight, got {in_flight}")
        self.own_process = OwnProcess()
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._waited_for = waited_for
        self._results = ResultQueue(program)
        self.queued = most_under_way(program)
        self._limit = self.queued if in_flight is None else in_flight
        self._owners: deque[_Stream] = deque()
        self._waiting: deque[_Stream] = deque()
        self._last_activity = time.monotonic()
        self._failure: Callable[[], TvmSplitError] | None = None
        self._closed = False
        plan = machine_plan(program, CLIENT)
        self.outgoing = {
            machine: OutgoingLink(self, routes, flat_bytes, array_slot, timeouts=timeouts)
            for machine, routes in plan.by_destination.items()
        }
        self.incoming = {
            machine: IncomingLink(self, routes, array_slot, timeouts=timeouts, reuse=False)
            for machine, routes in plan.by_source.items()
        }
        self._links: tuple[LinkEnd, ...] = (*self.outgoing.values(), *self.incoming.values())
        self._sends = plan.sends(program.given)

    @property
    def submitted(self) -> int:
        """Micro-batches so far."""
        return self._results.submitted

    def run(self, inputs: Sequence[Any]) -> tuple[Array, ...]:
        """The outputs for one micro-batch."""
        arrays = checked_inputs(self._program, inputs)
        with self._begun() as stream:
            self._submit(stream, arrays, self._timeout_seconds)
            stream.fed = True
            (result,) = self._drain(stream)
        return result

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[tuple[Array, ...]]:
        """The outputs for many micro-batches, in order."""
        with self._begun() as stream:
            threading.Thread(target=self._feed, args=(stream, batches), name="feed", daemon=True).start()
            yield from self._drain(stream)

    def require_usable(self) -> None:
        """Raises what ended the pipeline, if it has ended."""
        self.own_process.require()
        with self.lock:
            self._require_usable_locked()

    def require_open(self) -> None:
        """Raises a `WorkerError` if all was closed; what has failed may be asked what it did until then."""
        self.own_process.require()
        with self.lock:
            self._require_open_locked()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, error: TvmSplitError) -> None:
        """The pipeline is done for: everybody who waits, or comes later, gets this error."""
        logger.info("a pipeline has failed: %s", error)
        with self.lock:
            if self._failure is None:
                self._failure = lambda: type(error)(str(error))
            self._halt_locked()

    def wait_failure(self, timeout_seconds: float) -> TvmSplitError | None:
        """What has ended the pipeline, waiting a little for it."""
        with self.lock:
            self._changed.wait_for(lambda: self._failure is not None, timeout_seconds)
            return self._failure() if self._failure is not None else None

    def close(self) -> bool:
        """Ends everything; whether there was anything to end, and nothing had failed before."""
        with self.lock:
            was_usable = not self._closed and self._failure is None
            self._closed = True
            self._halt_locked()
            return was_usable

    def moved(self) -> None:
        self._last_activity = time.monotonic()

    def transferred(self, kind: str, route: PlannedRoute, sequence: int, start: int, end: int, size_bytes: int) -> None:
        pass

    def deliver(self, route: PlannedRoute, sequence: int, value: Any, release: Callable[[], None]) -> None:
        with self.lock:
            self._results.arrive(route.tensor.name, sequence, value, release)
            self._hand_out_locked()
        self._flush()

    def room_locked(self) -> None:
        self._changed.notify_all()

    def starves_locked(self, route: PlannedRoute, sequence: int) -> bool:
        return True  # results are handed out at once

    @contextlib.contextmanager
    def _begun(self) -> Iterator[_Stream]:
        self.own_process.require()
        stream = _Stream()
        try:
            yield stream
        finally:
            self.own_process.require()
            with self.lock:
                stream.over = True
                stream.ready.clear()
                self._changed.notify_all()

    def _feed(self, stream: _Stream, batches: Iterable[Sequence[Any]]) -> None:
        error: BaseException | None = None
        try:
            for batch in batches:
                # A source may use its arrays again as soon as it is asked for the next ones.
                copies = [array.copy() for array in checked_inputs(self._program, batch)]
                if not self._submit(stream, copies, None):
                    return
        except BaseException as raised:
            error = raised
        with self.lock:
            stream.fed, stream.error = True, error
            self._changed.notify_all()

    def _submit(self, stream: _Stream, inputs: Sequence[Array], timeout_seconds: float | None) -> bool:
        """Queues a micro-batch when it is the stream's turn and there is room; False if nobody wants the result."""
        given = given_arrays(self._program, inputs)
        with self.lock:
            self._waiting.append(stream)
            try:
                while True:
                    self._require_usable_locked()
                    if stream.over:
                        return False
                    if self._next_locked() is stream:
                        break
                    self._wait_locked(stream, timeout_seconds, self._results.taken)
                if not stream.pending:
                    stream.since = time.monotonic()
                sequence = self._results.submit(inputs)
                self._owners.append(stream)
                stream.pending.append(sequence)
                for tensor, place, machine in self._sends[sequence % len(self._sends)]:
                    self.outgoing[machine].put_locked(tensor, sequence, given[place])
                self._hand_out_locked()
            finally:
                self._waiting.remove(stream)
                self._changed.notify_all()
        self._flush()
        return True

    def _next_locked(self) -> _Stream | None:
        """Whose turn it is to submit a micro-batch."""
        submitted = self._results.submitted
        sends = self._sends[submitted % len(self._sends)]
        has_room = all(self.outgoing[machine].has_room_locked(tensor) for tensor, _, machine in sends)
        if submitted - self._results.taken >= self._limit or not has_room:
            return None
        return next(filter(self._keeps_up_locked, self._waiting), None)

    def _keeps_up_locked(self, stream: _Stream) -> bool:
        """Whether a stream's results are taken: what it does not take lies in this process's memory."""
        ready = len(stream.ready)
        return ready < self._program.results_lead and ready + len(stream.pending) < self._limit

    def _hand_out_locked(self) -> None:
        """Gives results that are complete to their streams; those of streams that are over are thrown away."""
        while (result := self._results.take()) is not None:
            stream = self._owners.popleft()
            stream.pending.popleft()
            if not stream.over:
                stream.ready.append(result)
        self._changed.notify_all()

    def _drain(self, stream: _Stream) -> Iterator[tuple[Array, ...]]:
        """The results of a stream, to its end."""
        while True:
            with self.lock:
                while not stream.ready:
                    self._require_usable_locked()
                    if stream.fed and not stream.pending:
                        if stream.error is not None:
                            raise stream.error
                        return
                    due = bool(stream.pending)
                    self._wait_locked(stream, self._timeout_seconds if due else None, stream.pending[0] if due else 0)
                result = stream.ready.popleft()
                self._changed.notify_all()
            yield result

    def _wait_locked(self, stream: _Stream, timeout_seconds: float | None, sequence: int) -> None:
        """Waits for a change; with a timeout, only as long as something has moved within it, or the stream is young."""
        if timeout_seconds is None:
            self._changed.wait()
            return
        remaining = max(self._last_activity, stream.since) + timeout_seconds - time.monotonic()
        if remaining <= 0:
            raise DeadlineError(
                f"nothing has moved for {timeout_seconds:g} seconds; waiting for {self._waited_for(sequence)}. "
                "If it only is slow, open the pipeline with a longer timeout"
            )
        self._changed.wait(remaining)

    def _require_usable_locked(self) -> None:
        self._require_open_locked()
        if self._failure is not None:
            raise self._failure()

    def _require_open_locked(self) -> None:
        if self._closed:
            raise WorkerError("this pipeline is closed")

    def _flush(self) -> None:
        for link in self._links:
            link.flush()

    def _halt_locked(self) -> None:
        for link in self._links:
            link.close_locked()
        self._changed.notify_all()
