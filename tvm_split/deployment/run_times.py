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

from rpc_runtime.program.events import now

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
MOMENTS_KEPT = 2048
"""Number of latest results of a stream whose times are kept."""


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
    """The times at which a stream's latest results came and its last input was taken. Thread-safe."""

    def __init__(self) -> None:
        self.began = 0
        self._fed: int | None = None
        self._lock = threading.Lock()
        self._moments: deque[int] = deque(maxlen=MOMENTS_KEPT)
        self.count = 0
        """The number of all results."""

    def feeding(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the inputs, and record when the last one was taken."""
        yield from batches
        self.fed(now())

    def fed(self, moment: int) -> None:
        """Record that the stream's last input was taken at ``moment`` (nanoseconds of the monotonic clock)."""
        self._fed = moment

    def note(self, moment: int) -> None:
        """Record that one more result came at ``moment`` (nanoseconds)."""
        with self._lock:
            self._moments.append(moment)
            self.count += 1

    def restart(self) -> None:
        with self._lock:
            self._moments.clear()
            self.count = 0

    def steady(self) -> Window | None:
        """The window from the first kept result after the fill to the last result before the input ended.

        Later results come faster if machines share cores, because idle machines leave their cores to the others. As
        many results are skipped first as micro-batches were in flight when the input ended: they fill the pipeline. For
        shorter streams all results after the first tenth count. None for streams of fewer than three results.
        """
        with self._lock:
            moments, forgotten = list(self._moments), self.count - len(self._moments)
        last = len(moments) - 1
        # Skip the first result even of a short stream: until then the pipeline was filling.
        first = max(0, max(1, int((forgotten + len(moments)) * FILL_SHARE)) - forgotten)
        if self._fed is not None:
            last_fed = bisect.bisect_right(moments, self._fed) - 1
            under_way = last - last_fed
            for begin in (max(first, under_way - forgotten), first):
                if last_fed - begin >= max(LEAST_SHARE * len(moments), 2):
                    return Window(moments[begin], moments[last_fed], last_fed - begin)
        return Window(moments[first], moments[last], last - first) if last > first else None


class RunTimes:
    """Records of a deployment's single runs and streams. Thread-safe; memory is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[Window] = deque(maxlen=RUNS_KEPT)
        self._streams: deque[StreamEvents] = deque(maxlen=STREAMS_KEPT)
        self._restarted = 0

    def restart(self) -> None:
        """Forget the results so far, and the runs that have begun: other machines compute from now on."""
        with self._lock:
            self._restarted = now()
            for stream in self._streams:
                stream.restart()

    @contextmanager
    def run(self) -> Iterator[None]:
        """A context that records a single run; a run that raises is not recorded."""
        start = now()
        yield
        with self._lock:
            self._runs.append(Window(start, now(), 1))

    def call(self, future: Future[Result]) -> Future[Result]:
        """Record a background run once ``future`` has a result; return the future. A run that fails is not recorded."""
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
            runs = tuple(run for run in self._runs if run.start >= max(since, self._restarted))
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
