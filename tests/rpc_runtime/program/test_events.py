"""Recorded events: totals are sums of rows, readers miss nothing unnoticed, and nonsense of a worker is refused."""

import sys
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rpc_runtime.errors import ProtocolError
from rpc_runtime.program.clocks import ClockSample, MachineClock
from rpc_runtime.program.events import (
    BLOCK,
    COMPUTE,
    MOST_TRACKS,
    RECEIVE,
    RING_ROWS,
    ROWS,
    SEND,
    WAIT,
    Observation,
    Recorder,
    Track,
    aligned,
    checked,
    events_of,
    now,
    statistics_of,
)

SECOND = 1_000_000_000
tracks = st.builds(
    Track, st.sampled_from([RECEIVE, SEND, COMPUTE, WAIT, BLOCK]), st.sampled_from(["one", "two"]), st.just("box")
)
events = st.tuples(tracks, st.integers(0, 1 << 40), st.integers(0, SECOND), st.integers(0, 1 << 40))


def recorded(listed: list[tuple[Track, int, int, int]]) -> Recorder:
    recorder = Recorder()
    for track, sequence, duration, size_bytes in listed:
        number = recorder.track(track.kind, track.stage, track.peer)
        recorder.record(number, sequence, 0, duration, size_bytes, value=3)
    return recorder


@given(st.lists(events, max_size=40))
def test_totals_are_the_sums_of_the_rows(listed):
    seen = recorded(listed).observe(since=0)
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for track, _, duration, size_bytes in listed:
        for place, addend in enumerate((1, duration, size_bytes)):
            sums[track.kind, track.stage][place] += addend
    assert {(t.kind, t.stage): [t.events, t.nanoseconds, t.size_bytes] for t in seen.tracks} == sums
    (one, two) = statistics_of("box", ["one", "two"], seen.tracks).values()
    for stage in (one, two):
        assert stage.micro_batches == sums[COMPUTE, stage.name][0]
        for kind, seconds in {
            COMPUTE: stage.compute_seconds,
            WAIT: stage.wait_seconds,
            BLOCK: stage.block_seconds,
            RECEIVE: stage.receive_seconds,
            SEND: stage.send_seconds,
        }.items():
            assert seconds == pytest.approx(sums[kind, stage.name][1] * 1e-9)
        assert (stage.bytes_received, stage.bytes_sent) == (sums[RECEIVE, stage.name][2], sums[SEND, stage.name][2])
        durations = [row[2] * 1e-9 for row in listed if (row[0].kind, row[0].stage) == (COMPUTE, stage.name)]
        assert stage.median_compute_seconds == pytest.approx(np.median(durations) if durations else 0.0)


@given(st.lists(events, max_size=40), st.integers(0, 50))
def test_a_reader_gets_what_it_has_not_read(listed, read):
    seen = recorded(listed).observe(since=read)
    expected = listed[read:]
    assert (seen.newest, seen.lost) == (len(listed), 0)
    got = [
        (event.kind, event.stage, event.sequence, event.end_nanoseconds)
        for event in events_of("box", seen.tracks, seen.table())
    ]
    assert got == [(track.kind, track.stage, sequence, duration) for track, sequence, duration, _ in expected]


def test_without_a_number_there_are_no_rows_but_all_totals():
    seen = recorded([(Track(COMPUTE, "one"), 0, 5, 0)] * 3).observe()
    assert (seen.rows, seen.tracks[0].events) == (b"", 3)


def test_a_slow_reader_learns_how_many_rows_are_lost():
    recorder = Recorder()
    track = recorder.track(COMPUTE, "one")
    count = RING_ROWS + 1000
    for sequence in range(count):
        recorder.record(track, sequence, sequence, sequence + 2)
    seen = recorder.observe(since=500)
    assert (seen.newest, seen.lost, len(seen.table())) == (count, 500, RING_ROWS)
    assert [event.sequence for event in events_of("box", seen.tracks, seen.table())] == [*range(1000, count)]
    assert (seen.tracks[0].events, seen.tracks[0].nanoseconds) == (count, 2 * count)


def test_many_kernels_share_a_track():
    """And stages that record something for the first time still get a track of their own."""
    recorder = Recorder()
    for number in range(2 * MOST_TRACKS):
        for stage in ("one", "two"):
            recorder.record(recorder.kernel_track(stage, f"kernel {number}"), 0, 0, 1)
    recorder.record(recorder.kernel_track("one", "kernel 0"), 0, 0, 1)
    recorder.record(recorder.track(COMPUTE, "three"), 0, 0, 5)
    tracks = {(track.stage, track.detail): track.events for track in recorder.observe().tracks}
    assert len(tracks) <= MOST_TRACKS + 3
    assert sum(tracks.values()) == 4 * MOST_TRACKS + 2
    assert tracks["one", "kernel 0"] == 2
    assert tracks["three", ""] == 1


def test_threads_neither_lose_nor_mix_events():
    recorder = Recorder()
    each = 20_000
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def run(thread: int) -> None:
        number = recorder.track(COMPUTE, f"stage {thread}")
        for sequence in range(each):
            recorder.record(number, sequence, thread, 2 * thread, thread)

    try:
        threads = [threading.Thread(target=run, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    seen = recorder.observe(since=0)
    assert (seen.newest, seen.lost) == (3 * each, 0)
    assert {t.stage: (t.events, t.nanoseconds, t.size_bytes) for t in seen.tracks} == {
        f"stage {thread}": (each, each * thread, each * thread) for thread in range(3)
    }
    table = seen.table()
    assert [seen.tracks[number].stage for number in table["track"]] == [f"stage {start}" for start in table["start"]]


def test_events_are_in_the_clock_of_the_reader():
    seen = recorded([(Track(SEND, "one"), 4, 10, 7)]).observe(since=0)
    (event,) = events_of("box", seen.tracks, aligned(seen.table(), MachineClock([ClockSample(0, 1000, 5)])))
    assert (event.start_nanoseconds, event.end_nanoseconds, event.size_bytes, event.value) == (-1000, -990, 7, 3)


def told(numbers: list[tuple[int, int, int, int]], **changes: object) -> Observation:
    """An observation with rows of (number, start, duration, track)."""
    table = np.zeros(len(numbers), ROWS)
    for row, (number, start, duration, track) in zip(table, numbers, strict=True):
        row["number"], row["start"], row["duration"], row["track"] = number, start, duration, track
    return replace(Observation((Track(COMPUTE, "one"),), table.tobytes(), 10, 0, now()), **changes)


def test_what_a_recorder_may_return_is_accepted():
    assert checked(told([(4, 1, 2, 0), (6, 1, 2, 0)]), 3).newest == 10
    assert checked(told([]), None).lost == 0


@pytest.mark.parametrize(
    "seen",
    [
        told([(3, 1, 2, 0)]),
        told([(5, 1, 2, 0), (5, 1, 2, 0)]),
        told([(5, 1, 2, 0), (4, 1, 2, 0)]),
        told([(11, 1, 2, 0)]),
        told([(4, 1, 2, 1)]),
        told([(4, 1, -2, 0)]),
        told([(4, -1, 2, 0)]),
        told([(4, 1, 1 << 62, 0)]),
        told([(4, 1 << 62, 1, 0)]),
        told([], rows=b"x" * (ROWS.itemsize + 1)),
        told([], rows=b"\0" * ROWS.itemsize * (RING_ROWS + 1)),
        told([], tracks=(Track("dance", "one"),)),
        told([], processor_seconds=float("nan")),
        told([], newest=2),
    ],
    ids=[
        "read before", "twice", "backwards", "beyond the newest", "no such track", "ends before it starts",
        "before the clock", "far in the future", "later than its clock", "half a row", "more than the ring", "a kind",
        "no number", "fewer than before",
    ],
)  # fmt: skip
def test_nonsense_is_refused(seen):
    with pytest.raises(ProtocolError):
        checked(seen, 3)


def test_rows_have_tracks_while_new_ones_are_recorded():
    """A reader never gets a row without its track, whenever the track was made."""
    recorder, switching = Recorder(), sys.getswitchinterval()
    ended = threading.Event()

    def record() -> None:
        for number in range(3000):
            recorder.record(recorder.track(COMPUTE, f"stage_{number}"), number, 0, 0)
        ended.set()

    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=record)
        thread.start()
        while not ended.is_set():
            checked(recorder.observe(since=0), 0)
        thread.join()
    finally:
        sys.setswitchinterval(switching)
    assert len(recorder.observe(since=0).tracks) == 3000


def test_a_long_wait_does_not_count_in_the_rate(monkeypatch):
    recorder, end = Recorder(), now()
    monkeypatch.setattr("rpc_runtime.program.events.now", lambda: end)
    recorder.record(recorder.track(WAIT, "stage"), 0, end - 3600 * 10**9, end)
    for number in range(100):
        recorder.record(recorder.track(COMPUTE, "stage"), number, end - 10**9 + number * 10**7, end)
    assert recorder.micro_batches_per_second() == pytest.approx(100)


def test_an_answer_that_was_overtaken_changes_no_clock():
    clock = MachineClock()
    clock.add(ClockSample(10 * 10**9, 5, 1))
    clock.add(ClockSample(2 * 10**9, 900, 1))
    assert clock.of_reader(np.array([3 * 10**9, 11 * 10**9])).tolist() == [3 * 10**9 - 5, 11 * 10**9 - 5]
