"""Numbers micro-batches, feeds them into links fairly, and returns results in order to calls and streams."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from rpc_runtime.client.result_queue import ResultQueue, array_slot
from rpc_runtime.errors import DeadlineError, TvmSplitError, WorkerError
from rpc_runtime.processes import OwnProcess
from rpc_runtime.program.events import FAILURE, FLIGHT, SEND, WINDOW, Recorder, now
from rpc_runtime.program.inputs import checked_inputs, client_arrays, flat_bytes
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT, Route
from rpc_runtime.program.runner import Outputs
from rpc_runtime.program.specs import Array
from rpc_runtime.transports.credits import MOST_MORE
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.links import IncomingLink, OutgoingLink
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts

logger = logging.getLogger(__name__)

CLOSED = WorkerError("this pipeline is closed")
IN_FLIGHT_PER_LEAD = 4
"""The default limit of micro-batches in flight, as a multiple of ``results_lead`` times the replicas of a stage."""


def default_in_flight(program: Program) -> int:
    """Return the default limit of micro-batches in flight: more than all queues of the pipeline can hold."""
    replicas = max(map(len, program.replicas.values()), default=1)
    # Links of high latency may widen their windows, each by MOST_MORE; a chain has one link more than stages.
    return IN_FLIGHT_PER_LEAD * program.results_lead * replicas + MOST_MORE * (len(program.replicas) + 1)


@dataclass(eq=False)
class _Stream:
    """The state of a stream.

    ``results`` has what the caller takes next: results in order, then the error that ends the stream, or None.
    ``pending`` micro-batches were fed and their results are not taken; ``ready`` of them have their result. ``is_fed``:
    no more micro-batches come; ``error`` is what the caller's iterable raised. ``is_over``: the caller takes no more
    results.
    """

    # A queue (written in C) wakes its reader without the pipeline's lock.
    results: SimpleQueue[Outputs | BaseException | None] = field(default_factory=SimpleQueue)
    pending: int = 0
    ready: int = 0
    is_fed: bool = False
    error: BaseException | None = None
    is_over: bool = False

    def end_if_complete_locked(self) -> None:
        if self.is_fed and self.ready == self.pending:
            self.results.put(self.error)


@dataclass(eq=False, repr=False)
class _MicroBatch:
    """A micro-batch; its ``stream`` is None if a single call submitted it.

    ``tensors`` are the values of the program's ``client_tensors``; ``since`` is when the wait for the result began, in
    seconds of the monotonic clock. ``sequence`` is None until it is fed.
    """

    stream: _Stream | None
    inputs: Sequence[Array]
    tensors: Sequence[Array]
    future: Future[Outputs] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    sequence: int | None = None
    fed_nanoseconds: int = 0


class Dispatcher:
    """Feeds micro-batches into the client's links, as their `LinkOwner`, and returns the results. Thread-safe.

    Micro-batches wait in one queue, with at most one per stream. So if room is scarce, streams are served round-robin,
    and a stream whose results are not taken does not block others. ``waited_for(sequence)`` returns, for messages, what
    a micro-batch waits for.
    """

    device = None

    def __init__(
        self,
        program: Program,
        timeout_seconds: float,
        in_flight: int | None,
        waited_for: Callable[[int], str],
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
    ) -> None:
        self.own_process = OwnProcess()
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._calls_changed = threading.Condition(self.lock)
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._waited_for = waited_for
        self._results = ResultQueue(program)
        self._limit = default_in_flight(program) if in_flight is None else in_flight
        self._streams: set[_Stream] = set()
        self._waiting: deque[_MicroBatch] = deque()
        self._in_flight: deque[_MicroBatch] = deque()
        self._last_activity = time.monotonic()
        self.recorder = Recorder()
        self._flights = self.recorder.track(FLIGHT)
        self._failure: TvmSplitError | None = None
        """Why the pipeline has ended; `CLOSED` after `close`."""
        own = program.on(CLIENT)
        self.outgoing = {
            machine: OutgoingLink(self, routes, flat_bytes, array_slot, timeouts=timeouts)
            for machine, routes in own.by_destination.items()
        }
        self.incoming = {
            machine: IncomingLink(self, routes, array_slot, timeouts=timeouts, reuse=False)
            for machine, routes in own.by_source.items()
        }
        self._links: tuple[LinkEnd, ...] = (*self.outgoing.values(), *self.incoming.values())
        self._sends = own.sends(program.client_tensors)
        threading.Thread(target=self._feed_calls, name="feed-calls", daemon=True).start()

    @property
    def completed(self) -> int:
        """The number of micro-batches with a complete result so far."""
        return self._results.taken

    def submit(self, inputs: Sequence[Any]) -> Future[Outputs]:
        """Queue one micro-batch; return a future for its outputs, which can be cancelled until the micro-batch is fed.

        The inputs must not change until they are sent, which is when there is room.

        Raises:
            InputError: an input does not fit the program.
            WorkerError: the pipeline has failed, or is closed.
        """
        arrays = checked_inputs(self._program, inputs)
        self.own_process.require()
        batch = _MicroBatch(None, arrays, client_arrays(self._program, arrays))
        with self.lock:
            self._require_usable_locked()
            self._waiting.append(batch)
        self._feed()
        return batch.future

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[Outputs]:
        """Yield the outputs for many micro-batches, in order."""
        self.own_process.require()
        stream = _Stream()
        with self.lock:
            self._require_usable_locked()
            self._streams.add(stream)
        threading.Thread(target=self._feed_stream, args=(stream, batches), name="feed", daemon=True).start()
        try:
            yield from self._drain(stream)
        finally:
            self.own_process.require()
            with self.lock:
                stream.is_over = True
                self._streams.discard(stream)
                self._waiting = deque(batch for batch in self._waiting if batch.stream is not stream)
                self._changed.notify_all()

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
    def has_failed(self) -> bool:
        """Whether the pipeline has failed and cannot continue."""
        return self._failure is not None

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
            if was_usable and error is not CLOSED:
                self.recorder.happened(f"{FAILURE}{error}")
            for link in self._links:
                link.close_locked()
            self._changed.notify_all()
            self._calls_changed.notify()
            unfinished = (*self._in_flight, *self._waiting)
            self._waiting.clear()
            for stream in self._streams:
                stream.results.put(_copy(failure))
        for batch in unfinished:
            if batch.future.cancelled():
                batch.future.set_running_or_notify_cancel()  # wakes those that wait for several futures
            _settle(batch.future, _copy(failure))
        return was_usable

    def moved(self) -> None:
        """Restart the timeout of all results, because a tensor or a part of one was sent or received."""
        self._last_activity = time.monotonic()

    def transferred(
        self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int, under_way: int
    ) -> None:
        """Record a transfer of an input or output."""
        peer = route.destination if kind == SEND else route.source
        track = self.recorder.track(kind, "", peer, route.tensor.name)
        self.recorder.record(track, sequence, start, end, size_bytes, under_way)

    def widened(self, route: Route, sequence: int, depth: int) -> None:
        """Record that the client allows more micro-batches of an output under way."""
        moment = now()
        self.transferred(WINDOW, route, sequence, moment, moment, 0, depth)

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Take a received output tensor; return complete results to their callers."""
        with self.lock:
            self._results.arrive(route.tensor.name, sequence, value, release)
            done = self._hand_out_locked()
            self._notify_locked()
        self._pass_on(done)

    def room_locked(self) -> None:
        """Wake the feeding threads, because an outgoing link has room for one more micro-batch of a tensor."""
        self._notify_locked()

    def starves_locked(self, route: Route, sequence: int) -> bool:
        """Return True: results are returned at once, so the client always waits for the next tensor."""
        return True

    def _feed_stream(self, stream: _Stream, batches: Iterable[Sequence[Any]]) -> None:
        """Feed the micro-batches of a stream until ``batches`` ends or raises an error, or the stream has ended."""
        error: BaseException | None = None
        try:
            for batch in batches:
                # The iterable may reuse its arrays when the next micro-batch is requested.
                copies = [array.copy() for array in checked_inputs(self._program, batch)]
                if not self._put(stream, _MicroBatch(stream, copies, client_arrays(self._program, copies))):
                    return
        except BaseException as raised:
            error = raised
        with self.lock:
            stream.is_fed, stream.error = True, error
            stream.end_if_complete_locked()

    def _put(self, stream: _Stream, batch: _MicroBatch) -> bool:
        """Wait until a stream's micro-batch was fed; return False if the stream has ended."""
        with self.lock:
            if not stream.is_over:
                self._waiting.append(batch)
        while True:
            self._feed()
            with self.lock:
                self._require_usable_locked()
                if stream.is_over or batch.sequence is not None:
                    return not stream.is_over
                if self._next_locked() is None:
                    self._changed.wait()

    def _feed(self) -> None:
        """Feed all micro-batches that there is room for, of any stream or call."""
        with self.lock:
            done = self._dispatch_locked()
        self._pass_on(done)

    def _dispatch_locked(self) -> list[_Result]:
        """Feed the waiting micro-batches for which there is room; return the results that are then complete.

        The caller releases the lock, and passes the results to `_pass_on`.
        """
        done: list[_Result] = []
        while (batch := self._next_locked()) is not None:
            self._waiting.remove(batch)
            stream = batch.stream
            if stream is None and not batch.future.set_running_or_notify_cancel():
                continue
            if stream is not None:
                stream.pending += 1
                batch.since = time.monotonic()
                self._changed.notify_all()  # its feeding thread, if another thread feeds this micro-batch
            batch.sequence = sequence = self._results.submit(batch.inputs)
            batch.fed_nanoseconds = now()
            self._in_flight.append(batch)
            for tensor, position, machine in self._sends[sequence % len(self._sends)]:
                self.outgoing[machine].put_locked(tensor, sequence, batch.tensors[position])
            done += self._hand_out_locked()
        return done

    def _next_locked(self) -> _MicroBatch | None:
        """Return the next micro-batch to feed; None if none waits, there is no room, or the pipeline has ended.

        A stream whose results are not taken is skipped, because its results use memory of this process.
        """
        if not self._waiting or self._failure is not None:
            return None
        submitted = self._results.submitted
        sends = self._sends[submitted % len(self._sends)]
        is_full = submitted - self._results.taken >= self._limit
        if is_full or not all(self.outgoing[machine].has_room_locked(tensor) for tensor, _, machine in sends):
            return None
        for batch in self._waiting:
            if batch.stream is None or not self._is_held_locked(batch.stream):
                return batch
        return None

    def _is_held_locked(self, stream: _Stream) -> bool:
        """Return whether a stream must wait until its caller takes a result."""
        return stream.ready >= self._program.results_lead or stream.pending >= self._limit

    def _hand_out_locked(self) -> list[_Result]:
        """Remove the complete results from the queue, in order; return those of single calls with their futures."""
        done: list[_Result] = []
        while (result := self._results.take()) is not None:
            batch = self._in_flight.popleft()
            self.recorder.record(self._flights, self._results.taken - 1, batch.fed_nanoseconds, now())
            if (stream := batch.stream) is None:
                done.append((batch.future, result))
            else:
                stream.ready += 1
                stream.results.put(result)
                stream.end_if_complete_locked()
        return done

    def _drain(self, stream: _Stream) -> Iterator[Outputs]:
        """Yield the results of a stream until its end."""
        while (result := stream.results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            with self.lock:
                was_held = self._is_held_locked(stream)
                stream.pending -= 1
                stream.ready -= 1
                if was_held:
                    self._notify_locked()
            yield result

    def _feed_calls(self) -> None:
        """Feed calls that had to wait for room, and fail micro-batches that take too long, until the pipeline ends."""
        while True:
            self._feed()
            with self.lock:
                if self._failure is not None:
                    return
                late, seconds = self._take_late_locked()
                if not late and self._next_locked() is None:
                    self._calls_changed.wait(min(seconds, threading.TIMEOUT_MAX))
            for batch in late:
                error = self._deadline_error(batch)
                _settle(batch.future, error)
                with self.lock:
                    if batch.stream is not None and batch in self._in_flight:
                        batch.stream.results.put(error)

    def _take_late_locked(self) -> tuple[list[_MicroBatch], float]:
        """Return the late micro-batches, and the seconds until the next one can be late.

        Removes those micro-batches of single calls that are late and still wait to be fed.
        """
        seconds = self._last_activity + self._timeout_seconds - time.monotonic()
        if seconds > 0:
            return [], seconds
        waiting_calls = [batch for batch in self._waiting if batch.stream is None]
        due = [batch for batch in (*self._in_flight, *waiting_calls) if not batch.future.done()]
        late = [batch for batch in due if self._remaining_locked(batch) <= 0]
        self._waiting = deque(batch for batch in self._waiting if batch not in late)
        return late, min(map(self._remaining_locked, due), default=self._timeout_seconds)

    def _remaining_locked(self, batch: _MicroBatch) -> float:
        """Return the seconds until a result is late: the timeout after the last activity, or after ``batch.since``."""
        return max(self._last_activity, batch.since) + self._timeout_seconds - time.monotonic()

    def _deadline_error(self, batch: _MicroBatch) -> DeadlineError:
        sequence = self._results.taken if batch.sequence is None else batch.sequence
        return DeadlineError(
            f"nothing has moved for {self._timeout_seconds:g} seconds; waiting for {self._waited_for(sequence)}. "
            "If it is only slow, open the pipeline with a longer timeout"
        )

    def _require_usable_locked(self) -> None:
        if self._failure is not None:
            raise _copy(self._failure)

    def _notify_locked(self) -> None:
        """Wake the threads that wait for room, if a micro-batch can now be fed."""
        if self._next_locked() is not None:
            self._changed.notify_all()
            if any(batch.stream is None for batch in self._waiting):
                self._calls_changed.notify()

    def _pass_on(self, done: Iterable[_Result]) -> None:
        """Set the results of futures, then send what was fed. Call it without the lock: callbacks may run any code.

        Results come first, because sending may copy a whole input.
        """
        for future, result in done:
            _settle(future, result)
        for link in self._links:
            link.flush()


_Result = tuple[Future[Outputs], Outputs]


def _settle(future: Future[Outputs], result: Outputs | TvmSplitError) -> None:
    """Set the future's result or error, unless it has one already or is cancelled. Call it without the lock."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, TvmSplitError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _copy(error: TvmSplitError) -> TvmSplitError:
    """Return a copy of an error, because it may be raised in several threads."""
    return type(error)(str(error))
