"""The times of a deployment's runs and streams."""

import pytest
from hypothesis import given, strategies as st

from tvm_split.deployment.run_times import MOMENTS_KEPT, RunTimes, StreamEvents


def events(count: int, period: int = 1_000, fill: int = 0) -> StreamEvents:
    """A stream with a result every ``period`` nanoseconds; the first one comes ``fill`` later."""
    stream = StreamEvents()
    for number in range(1, count + 1):
        stream.note(fill + number * period)
    return stream


@given(st.integers(3, 3 * MOMENTS_KEPT), st.integers(1, 10**9), st.integers(0, 10**12))
def test_the_period_does_not_depend_on_length_or_fill(count, period, fill):
    window = events(count, period, fill).steady()
    assert window is not None
    assert window.seconds_per_result == pytest.approx(period * 1e-9)
    assert window.end == fill + count * period
    assert min(0.9 * count, MOMENTS_KEPT) - 2 <= window.results <= min(count - 2, MOMENTS_KEPT - 1)


@given(st.integers(0, 30), st.integers(100, 1000), st.integers(10**4, 10**6))
def test_results_that_come_when_there_is_nothing_more_to_feed_do_not_count(under_way, count, period):
    """As with shared cores: the first results wait until the pipeline is full, the last ones have the cores alone."""
    stream = StreamEvents()
    moments = [3 * period * number for number in range(1, under_way + 1)]
    begin = moments[-1] if moments else 0
    moments += [begin + period * number for number in range(1, count - 2 * under_way + 1)]
    moments += [moments[-1] + period * number // 3 for number in range(1, under_way + 1)]
    for moment in moments:
        stream.note(moment)
    stream.fed(moments[count - under_way - 1])
    window = stream.steady()
    assert window is not None
    assert window.seconds_per_result == pytest.approx(period * 1e-9)
    assert window.results >= 0.25 * count


def test_runs_and_streams_since_a_moment():
    times = RunTimes()
    with times.run():
        pass
    assert list(times.stream(iter_of(range(5)), StreamEvents())) == [0, 1, 2, 3, 4]
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

    stream = RunTimes().stream(results(), StreamEvents())
    assert next(stream) == 0
    stream.close()
    assert ended == [True]


def iter_of(values):
    yield from values
