"""What a deployment remembers of its runs and streams."""

import pytest
from hypothesis import given, strategies as st

from tvm_split.deployment.run_times import MOST_MARKS, RunTimes, StreamMarks


def marks(count: int, period: int = 1_000, fill: int = 0) -> StreamMarks:
    """A stream whose results come every ``period`` nanoseconds, the first one ``fill`` later than that."""
    stream = StreamMarks(0)
    for number in range(1, count + 1):
        stream.note(fill + number * period)
    return stream


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_short_stream_has_no_steady_part(count):
    assert marks(count).steady() is None


@given(st.integers(3, 3 * MOST_MARKS), st.integers(1, 10**9), st.integers(0, 10**12))
def test_the_period_does_not_depend_on_length_or_fill(count, period, fill):
    window = marks(count, period, fill).steady()
    assert window is not None
    assert window.seconds_per_result == pytest.approx(period * 1e-9)
    assert window.end == fill + count * period
    skipped = count - window.results - 1
    assert skipped >= 1
    assert skipped <= 0.1 * count + 1 + 2 * max(1, count // MOST_MARKS)


def test_memory_is_bounded():
    assert len(marks(10 * MOST_MARKS)._marks) < MOST_MARKS


def test_runs_and_streams_since_a_moment():
    times = RunTimes()
    with times.run():
        pass
    assert list(times.stream(iter_of(range(5)))) == [0, 1, 2, 3, 4]
    measured = times.measured()
    assert (len(measured.runs), len(measured.streams), measured.streamed) == (1, 1, 5)
    assert measured.latency_seconds is not None
    assert measured.period_seconds is not None
    later = times.measured(since=measured.streams[0].end)
    assert (later.runs, later.streams, later.streamed) == ((), (), 0)
    assert later.latency_seconds is None
    assert later.period_seconds is None


def test_a_run_that_raises_does_not_count():
    times = RunTimes()
    with pytest.raises(KeyError), times.run():
        raise KeyError
    assert times.measured().runs == ()


def test_closing_a_stream_closes_what_it_reads():
    ended = []

    def results():
        try:
            yield from range(10)
        finally:
            ended.append(True)

    stream = RunTimes().stream(results())
    assert next(stream) == 0
    stream.close()
    assert ended == [True]


def iter_of(values):
    yield from values
