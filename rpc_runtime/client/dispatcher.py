"""Numbers micro-batches, feeds them into links fairly, and returns results in order to calls and streams."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from rpc_runtime.client.client_links import ClientLinks
from rpc_runtime.client.streams import Call, MicroBatch, Stream
from rpc_runtime.errors import DeadlineError, TvmSplitError, WorkerError
from rpc_runtime.processes import OwnProcess
from rpc_runtime.program.events import now
from rpc_runtime.program.inputs import checked_inputs
from rpc_runtime.program.program import Program
from rpc_runtime.program.runner import Outputs
from rpc_runtime.sleeper import Due, Sleeper, do_due
from rpc_runtime.transports.credits import MOST_MORE

logger = logging.getLogger(__name__)

CLOSED = WorkerError("this pipeline is closed")
IN_FLIGHT_PER_LEAD = 4
"""The default limit of micro-batches in flight, as a multiple of ``results_lead`` times the replicas of a stage."""


def default_in_flight(program: Program) -> int:
    """Return the default limit of micro-batches in flight: more than all queues of the pipeline can hold."""
    replicas = max(map(len, program.replicas.values()), default=1)
    # Links of high latency may widen their windows, each by MOST_MORE; a chain has one link more than stages.
    return IN_FLIGHT_PER_LEAD * program.results_lead * replicas + MOST_MORE * (len(program.replicas) + 1)


class Dispatcher:
    """Feeds micro-batches into the client's links, and returns the results. Thread-safe.

    Micro-batches wait in one queue, with at most one per stream. So if room is scarce, streams are served round-robin,
    and a stream whose results are not taken does not block others.

    The links may be replaced: `detach` keeps what has no result yet, and `attach` feeds it again, in order, before
    anything else. Results are returned once and in order all the same. After `pause` little is left to be fed again.
    ``waited_for(sequence)`` returns, for messages, what a micro-batch waits for.
    """

    def __init__(self, program: Program, timeout_seconds: float, waited_for: Callable[[int], str]) -> None:
        self.own_process = OwnProcess()
        self.lock = threading.Lock()
        self._due: Due = Due()
        self._calls = Sleeper(self._due)
        """The thread that feeds calls and replays which had to wait."""
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._limit = default_in_flight(program)
        self._waited_for = waited_for
        self._links: ClientLinks | None = None
        self._emptied: threading.Event | None = None
        """Set when nothing is in flight; None unless feeding is paused."""
        self._completed = 0
        """The number of results of earlier links."""
        self._streams: set[Stream] = set()
        self._waiting: deque[MicroBatch] = deque()
        self._replay: deque[MicroBatch] = deque()
        """What earlier links were fed without a result, in order."""
        self._in_flight: deque[MicroBatch] = deque()
        self._last_activity = time.monotonic()
        self._failure: TvmSplitError | None = None
        """Why the pipeline has ended; `CLOSED` after `close`."""
        threading.Thread(target=self._feed_calls, name="feed-calls", daemon=True).start()

    def attach(self, links: ClientLinks, in_flight: int | None = None) -> None:
        """Feed these links from now on, first with what earlier links were fed without a result.

        ``in_flight`` limits the micro-batches that are fed and have no result; None is `default_in_flight`.

        Raises:
            WorkerError: the pipeline has failed, or is closed; the links are then closed.
        """
        with self.lock:
            if self._failure is not None:
                links.close_locked()
            self._require_usable_locked()
            self._program, self._links, self._emptied = links.program, links, None
            self._limit = default_in_flight(links.program) if in_flight is None else in_flight
            for stream in self._streams:
                stream.lead, stream.limit = links.program.results_lead, self._limit
            self.moved()
            self._feed_locked()
        self._flush()

    def pause(self) -> threading.Event:
        """Feed nothing until `attach`; return an event that is set when all results are there, or the pipeline ends."""
        with self.lock:
            self._emptied = threading.Event()
            if not self._in_flight or self._failure is not None:
                self._emptied.set()
            return self._emptied

    def detach(self) -> int:
        """Close the links; return how many micro-batches wait to be fed again to the next ones."""
        with self.lock:
            links, self._links = self._links, None
            if links is not None:
                links.close_locked()
                self._completed += links.results.taken
                unfinished = (*self._in_flight, *self._replay)
                self._replay = deque(batch for batch in unfinished if not (batch.is_late or batch.source.is_over))
                self._in_flight.clear()
            return len(self._replay)

    @property
    def completed(self) -> int:
        """The number of micro-batches with a complete result so far."""
        links = self._links
        return self._completed + (0 if links is None else links.results.taken)

    @property
    def is_computing(self) -> bool:
        """Whether something was fed and has no result."""
        return bool(self._in_flight or self._replay)

    def submit(self, inputs: Sequence[Any]) -> Future[Outputs]:
        """Queue one micro-batch; return a future for its outputs, which can be cancelled until the micro-batch is fed.

        The inputs must not change until they are sent, which is when there is room.

        Raises:
            InputError: an input does not fit the program.
            WorkerError: the pipeline has failed, or is closed.
        """
        arrays = checked_inputs(self._program.inputs, inputs)
        self.own_process.require()
        call = Call(self._due)
        batch = MicroBatch(call, arrays)
        batch.tensors(self._program)  # copies slices, which the lock should not wait for
        with self.lock:
            self._require_usable_locked()
            self._waiting.append(batch)
            self._feed_locked()
        self._flush()
        return call.future

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[Outputs]:
        """Yield the outputs for many micro-batches, in order."""
        self.own_process.require()
        stream = Stream(self._program.results_lead, self._limit, self._due)
        with self.lock:
            self._require_usable_locked()
            self._streams.add(stream)
        threading.Thread(target=self._feed_stream, args=(stream, batches), name="feed", daemon=True).start()
        try:
            yield from self._results_of(stream)
        finally:
            self.own_process.require()
            with self.lock:
                stream.is_over = True
                self._streams.discard(stream)
                self._waiting = deque(batch for batch in self._waiting if batch.source is not stream)
                self._replay = deque(batch for batch in self._replay if batch.source is not stream)
                stream.feeder.rouse_locked()
                self.room_locked()  # for which its feeder may have been woken
            self.wake()

    def require_usable(self) -> None:
        """Raise the error that ended the pipeline, if it has ended."""
        self.own_process.require()
        with self.lock:
            self._require_usable_locked()

    def require_open(self) -> None:
        """Raise a `WorkerError` if the pipeline is closed; after a failure, its statistics are still available."""
        self.own_process.require()
        if self._failure is CLOSED:
            raise _copy(CLOSED)

    @property
    def is_running(self) -> bool:
        """Whether micro-batches are fed: the pipeline has neither failed nor been closed, and its links are there."""
        return self._failure is None and self._links is not None

    def fail(self, error: TvmSplitError) -> None:
        """End the pipeline: all waiting and later calls raise this error."""
        logger.info("a pipeline has failed: %s", error)
        self._end(error)

    def close(self) -> bool:
        """End the pipeline; return whether it was usable, that is neither closed nor failed."""
        return self._end(CLOSED)

    def _end(self, error: TvmSplitError) -> bool:
        """End all links and calls with this error, or with the earlier failure unless ``error`` is `CLOSED`.

        Return whether the pipeline was usable.
        """
        with self.lock:
            was_usable = self._failure is None
            failure = error if self._failure is None or error is CLOSED else self._failure
            self._failure = failure
            if self._emptied is not None:
                self._emptied.set()
            if self._links is not None:
                self._links.close_locked()
            unfinished = (*self._in_flight, *self._replay, *self._waiting)
            for source in {*self._streams, *(batch.source for batch in unfinished)}:
                source.fail_locked(_copy(failure))
            self._waiting.clear()
            self._replay.clear()
            self._calls.rouse_locked()
        self.wake()
        return was_usable

    def moved(self) -> None:
        """Restart the timeout of all results, because a tensor or a part of one was sent or received."""
        self._last_activity = time.monotonic()

    def arrived(self, links: ClientLinks, tensor: str, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Take a received output tensor, unless it is of earlier links; return complete results to their callers."""
        with self.lock:
            if links.is_closed:
                return release()
            links.results.arrive(tensor, sequence, value, release)
            if links is not self._links:  # a stage without inputs may be ahead of `attach`
                return
            self._hand_out_locked(links)
            self.room_locked()
        self._flush()

    def room_locked(self) -> None:
        """Make it due to wake the thread that waits to feed the next micro-batch, if there is room for it."""
        if (batch := self._next_locked()) is not None:
            is_replay = batch.sequence is not None
            feeder = batch.source.feeder if isinstance(batch.source, Stream) and not is_replay else self._calls
            feeder.rouse_locked()

    def wake(self) -> None:
        do_due(self._due)

    def _feed_stream(self, stream: Stream, batches: Iterable[Sequence[Any]]) -> None:
        """Feed the micro-batches of a stream until ``batches`` ends or raises an error, or the stream has ended."""
        error: BaseException | None = None
        try:
            for batch in batches:
                # The iterable may reuse its arrays when the next micro-batch is requested.
                copied = MicroBatch(stream, [array.copy() for array in checked_inputs(self._program.inputs, batch)])
                copied.tensors(self._program)
                if not self._put(stream, copied):
                    return
        except BaseException as raised:
            error = raised
        with self.lock:
            stream.end_feeding_locked(error)
        self.wake()

    def _put(self, stream: Stream, batch: MicroBatch) -> bool:
        """Wait until a stream's micro-batch was fed; return False if the stream has ended."""
        with self.lock:
            if not stream.is_over:
                self._waiting.append(batch)
        while True:
            with self.lock:
                self._require_usable_locked()
                self._feed_locked()
                is_settled = stream.is_over or batch.sequence is not None
                if not is_settled:
                    stream.feeder.rest_locked()
            self._flush()
            if is_settled:
                return not stream.is_over
            stream.feeder.sleep()

    def _feed_locked(self) -> None:
        """Feed all micro-batches that there is room for, of any stream or call. The caller then flushes."""
        while (batch := self._next_locked()) is not None and (links := self._links) is not None:
            if self._replay:
                self._replay.popleft()
            else:
                self._waiting.remove(batch)
                if not batch.source.begin_locked():
                    continue
                if isinstance(batch.source, Stream):
                    batch.since = time.monotonic()
            moment, is_replay = now(), batch.sequence is not None
            batch.fed_nanoseconds = batch.fed_nanoseconds or moment
            self._in_flight.append(batch)
            batch.sequence = links.feed_locked(batch.inputs, batch.tensors(links.program))
            if is_replay:
                links.recorder.record(links.replays, batch.sequence, moment, moment)
            self._hand_out_locked(links)

    def _next_locked(self) -> MicroBatch | None:
        """Return the next micro-batch to feed; None if none waits, there is no room, or the pipeline has ended."""
        links = self._links
        if links is None or self._emptied or self._failure or not (self._replay or self._waiting):
            return None
        if links.under_way >= self._limit or not links.has_room_locked():
            return None
        if self._replay:
            return self._replay[0]
        return next((batch for batch in self._waiting if not batch.source.is_held), None)

    def _hand_out_locked(self, links: ClientLinks) -> None:
        """Hand out the complete results, in order."""
        while (result := links.results.take()) is not None:
            batch = self._in_flight.popleft()
            links.recorder.record(links.flights, links.results.taken - 1, batch.fed_nanoseconds, now())
            batch.source.give_locked(result)
        if self._emptied is not None and not self._in_flight:
            self._emptied.set()

    def _results_of(self, stream: Stream) -> Iterator[Outputs]:
        """Yield the results of a stream until its end."""
        while True:
            self.own_process.require()
            with self.lock:
                was_held = stream.is_held
                taken = stream.take_locked()
                if taken and was_held:
                    self.room_locked()
            if was_held:
                self.wake()
            for result in taken:
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    return
                yield result
            if not taken:
                stream.consumer.sleep()

    def _feed_calls(self) -> None:
        """Feed calls that had to wait for room, and fail micro-batches that take too long, until the pipeline ends."""
        while True:
            with self.lock:
                self._feed_locked()
                if self._failure is not None:
                    return
                late, seconds = self._take_late_locked()
                if not late:
                    self._calls.rest_locked()
            self._flush()
            for batch in late:
                error = self._deadline_error(batch)
                with self.lock:
                    if batch.sequence is None or batch in self._in_flight or batch in self._replay:
                        batch.source.fail_locked(error)
            if late:
                self.wake()
            else:
                self._calls.sleep(min(seconds, threading.TIMEOUT_MAX))

    def _take_late_locked(self) -> tuple[list[MicroBatch], float]:
        """Return the late micro-batches, and the seconds until the next one can be late.

        Removes those micro-batches of single calls that are late and still wait to be fed.
        """
        seconds = self._last_activity + self._timeout_seconds - time.monotonic()
        if seconds > 0:
            return [], seconds
        waiting_calls = [batch for batch in self._waiting if isinstance(batch.source, Call)]
        due = [batch for batch in (*self._in_flight, *self._replay, *waiting_calls) if not batch.is_late]
        late = [batch for batch in due if self._remaining_locked(batch) <= 0]
        for batch in late:
            batch.is_late = True
        self._waiting = deque(batch for batch in self._waiting if not batch.is_late)
        return late, min(map(self._remaining_locked, due), default=self._timeout_seconds)

    def _remaining_locked(self, batch: MicroBatch) -> float:
        """Return the seconds until a result is late: the timeout after the last activity, or after ``batch.since``."""
        return max(self._last_activity, batch.since) + self._timeout_seconds - time.monotonic()

    def _deadline_error(self, batch: MicroBatch) -> DeadlineError:
        waited_for = "machines for its stages"
        if (links := self._links) is not None:
            waited_for = self._waited_for(links.results.taken if batch.sequence is None else batch.sequence)
        return DeadlineError(
            f"nothing has moved for {self._timeout_seconds:g} seconds; waiting for {waited_for}. "
            "If it is only slow, open the pipeline with a longer timeout"
        )

    def _require_usable_locked(self) -> None:
        if self._failure is not None:
            raise _copy(self._failure)

    def _flush(self) -> None:
        """Send credits, wake threads and set results, then send inputs, which may copy them. Call without the lock."""
        links = self._links
        if links is None:
            self.wake()
        else:
            links.flush(self.wake)


def _copy(error: TvmSplitError) -> TvmSplitError:
    """Return a copy of an error, because it may be raised in several threads."""
    return type(error)(str(error))
