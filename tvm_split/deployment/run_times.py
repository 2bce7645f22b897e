"""Record when a deployment's results came, to measure latency and throughput; cheap enough to be always on."""

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
"""Share of a stream's results during which the pipeline fills; they are not measured."""
LEAST_SHARE = 0.25
"""Least share of a stream's results in the part that is fed and full; if it is smaller, more results are measured."""
RUNS_KEPT = 1001
"""Number of latest single runs that are kept."""
STREAMS_KEPT = 101
"""Number of latest streams that are kept."""
MOST_MOMENTS = 2048
"""Most times kept per stream. A longer stream keeps every second time, then every fourth, …, to bound memory."""


@dataclass(frozen=True)
class Window:
    """A time from ``start`` to ``end``, in nanoseconds of this process's monotonic clock, and its number of results."""

    start: int
    end: int
    results: int

    @property
    def seconds_per_result(self) -> float:
        return (self.end - self.start) * 1e-9 / self.results


class StreamEvents:
    """The times at which a stream's results came and its last input was taken. Thread-safe."""

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
        """Yield the inputs, and record when the last one was taken."""
        yield from batches
        self.fed(now())

    def fed(self, moment: int) -> None:
        """Record that the last input was taken at ``moment`` (nanoseconds)."""
        self._fed = moment

    def note(self, moment: int) -> None:
        """Record that one more result came at ``moment`` (nanoseconds)."""
        with self._lock:
            if self._count % self._stride == 0:
                self._moments.append(moment)
                if len(self._moments) == MOST_MOMENTS:
                    self._moments = self._moments[::2]
                    self._stride *= 2
            self._count += 1
            self._last = moment

    def steady(self) -> Window | None:
        """The window from the first result after the fill to the last result before the input ended.

        Later results come faster if machines share cores, because idle machines leave their cores to the others. As
        many results are skipped first as micro-batches were in flight when the input ended: they fill the pipeline. For
        shorter streams all results after the first tenth count. None for streams of fewer than three results.
        """
        with self._lock:
            # Skip the first result even of a short stream: until then the pipeline was filling.
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
    """Records of a deployment's single runs and streams. Thread-safe; memory is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[Window] = deque(maxlen=RUNS_KEPT)
        self._streams: deque[StreamEvents] = deque(maxlen=STREAMS_KEPT)

    @contextmanager
    def run(self) -> Iterator[None]:
        """A context that records a single run; a run that raises is not recorded."""
        start = now()
        yield
        with self._lock:
            self._runs.append(Window(start, now(), 1))

    def call(self, future: Future[Result]) -> Future[Result]:
        """Record a background run when it has its result, and return its future."""
        start = now()

        def ended(call: Future[Result]) -> None:
            if not call.cancelled() and call.exception() is None:
                with self._lock:
                    self._runs.append(Window(start, now(), 1))

        future.add_done_callback(ended)
        return future

    def stream(self, results: Generator[Result, None, None], events: StreamEvents) -> Generator[Result, None, None]:
        """Yield the results and record them in ``events``; closing this generator closes ``results``."""
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
        """The runs and streams that began at ``since`` (nanoseconds of the monotonic clock) or later."""
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
        """The median of the seconds of the single runs."""
        return statistics.median(run.seconds_per_result for run in self.runs) if self.runs else None

    @property
    def period_seconds(self) -> float | None:
        """Seconds between two results of a stream once the pipeline is full; the median over the streams."""
        return statistics.median(stream.seconds_per_result for stream in self.streams) if self.streams else None
