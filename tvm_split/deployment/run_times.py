"""When a deployment's results came: enough to know latency and throughput, and cheap enough to take down always."""

from __future__ import annotations

import bisect
import statistics
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rpc_runtime.program.measurements import now

Batch = TypeVar("Batch")
Result = TypeVar("Result")

FILL_SHARE = 0.1
"""The share of a stream's results that the pipeline may take to fill up; they do not count."""
LEAST_SHARE = 0.25
"""Of a stream's results, for a part of it that is fed and full to stand for it; else more of it counts."""
RUNS_KEPT = 1001
STREAMS_KEPT = 101
MOST_MOMENTS = 2048
"""Moments kept per stream. A longer one keeps every second, then every fourth, …, so an endless one stays small."""


@dataclass(frozen=True)
class Window:
    """From ``start`` to ``end``, in nanoseconds of this process's monotonic clock, and the results in between."""

    start: int
    end: int
    results: int

    @property
    def seconds_per_result(self) -> float:
        return (self.end - self.start) * 1e-9 / self.results


class StreamEvents:
    """The moments at which a stream's results came, and its last input was taken. Thread-safe."""

    def __init__(self, began: int) -> None:
        self.began = began
        self._fed: int | None = None
        self._lock = threading.Lock()
        self._stride = 1
        self._count = 0
        self._moments: list[int] = []
        self._last = began

    @property
    def count(self) -> int:
        return self._count

    def feeding(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same inputs; after the last one there is nothing more to feed."""
        yield from batches
        self.fed(now())

    def fed(self, moment: int) -> None:
        """The last input was taken at ``moment``."""
        self._fed = moment

    def note(self, moment: int) -> None:
        """One more result came at ``moment``."""
        with self._lock:
            if self._count % self._stride == 0:
                self._moments.append(moment)
                if len(self._moments) == MOST_MOMENTS:
                    self._moments = self._moments[::2]
                    self._stride *= 2
            self._count += 1
            self._last = moment

    def steady(self) -> Window | None:
        """From the first result after the fill to the last one that came while there was more to feed.

        Where machines share cores, results come faster afterwards: those that have nothing left to do leave them the
        cores. As many were under way at the end as fill the pipeline. Of streams that are too short for that, all
        results after the first tenth count; None of fewer than three results.
        """
        with self._lock:
            # Not the first result even of a short stream: it comes when the pipeline has only just been filled.
            first = max(1, -(-int(self._count * FILL_SHARE) // self._stride))
            if self._fed is not None:
                last = bisect.bisect_right(self._moments, self._fed) - 1
                under_way = self._count - 1 - last * self._stride
                for begin in (max(first, -(-under_way // self._stride)), first):
                    results = (last - begin) * self._stride
                    if results >= max(LEAST_SHARE * self._count, 2):
                        return Window(self._moments[begin], self._moments[last], results)
            results = self._count - 1 - first * self._stride
            return Window(self._moments[first], self._last, results) if results > 0 else None


class RunTimes:
    """What a deployment takes down of its single runs and streams. Thread-safe; memory is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[Window] = deque(maxlen=RUNS_KEPT)
        self._streams: deque[StreamEvents] = deque(maxlen=STREAMS_KEPT)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around a single run; one that raises is not taken down."""
        start = now()
        yield
        with self._lock:
            self._runs.append(Window(start, now(), 1))

    def call(self, future: Future[Result]) -> Future[Result]:
        """The same call in the background, taken down when it has its result."""
        start = now()

        def ended(call: Future[Result]) -> None:
            if not call.cancelled() and call.exception() is None:
                with self._lock:
                    self._runs.append(Window(start, now(), 1))

        future.add_done_callback(ended)
        return future

    def stream(self, results: Generator[Result, None, None], events: StreamEvents) -> Generator[Result, None, None]:
        """The same results, taken down in ``events`` as they come; closing this closes ``results``."""
        events.began = now()
        with self._lock:
            self._streams.append(events)
        try:
            for result in results:
                events.note(now())
                yield result
        finally:
            results.close()

    def measured(self, since: int = 0) -> MeasuredRuns:
        """What began at ``since`` (nanoseconds of the monotonic clock) or later."""
        with self._lock:
            runs = tuple(run for run in self._runs if run.start >= since)
            streams = [stream for stream in self._streams if stream.began >= since]
        windows = tuple(window for stream in streams if (window := stream.steady()) is not None)
        return MeasuredRuns(runs, windows, sum(stream.count for stream in streams))


@dataclass(frozen=True)
class MeasuredRuns:
    """Single runs, the steady parts of streams, and the number of all results of streams."""

    runs: tuple[Window, ...]
    streams: tuple[Window, ...]
    streamed: int

    @property
    def latency_seconds(self) -> float | None:
        """The median of the single runs."""
        return statistics.median(run.seconds_per_result for run in self.runs) if self.runs else None

    @property
    def period_seconds(self) -> float | None:
        """Between two results of a stream once the pipeline is full; the median over the streams."""
        return statistics.median(each.seconds_per_result for each in self.streams) if self.streams else None
