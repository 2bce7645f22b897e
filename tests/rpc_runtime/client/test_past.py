"""A deployment's recordings go on over its placements: readers see each event once, and totals that only grow."""

from hypothesis import given, settings, strategies as st

from rpc_runtime.client.past import Past
from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, WINDOW, Observation, Recorder

MACHINES = ("a", "b")
EVENT = st.tuples(st.sampled_from(MACHINES), st.sampled_from((COMPUTE, SEND, RECEIVE, WINDOW)), st.sampled_from("xyz"))
READ = st.just(None)
"""Something reads what is new."""
PLACEMENTS = st.lists(st.lists(EVENT | READ, max_size=12), min_size=1, max_size=4)
SUBMITTED = 100
"""Micro-batches of each placement."""


def named(seen: Observation) -> list[tuple[str, str, int, int]]:
    rows = seen.table()
    tracks = [seen.tracks[number] for number in rows["track"]]
    times = zip(tracks, rows["start"].tolist(), rows["sequence"].tolist(), strict=True)
    return [(track.kind, track.stage, start, sequence) for track, start, sequence in times]


def totals(seen: Observation) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {(t.kind, t.stage): (t.events, t.nanoseconds, t.size_bytes) for t in seen.tracks if t.events}


@settings(max_examples=25, deadline=None)
@given(PLACEMENTS)
def test_readers_see_one_series(placements: list[list[tuple[str, str, str] | None]]) -> None:
    past, clock = Past(), 0
    whole = {machine: Recorder() for machine in MACHINES}  # as if there was one placement
    cursors, read = dict.fromkeys(MACHINES, 0), {machine: list[tuple[str, str, int, int]]() for machine in MACHINES}
    counted = dict.fromkeys(MACHINES, 0)

    def look(since: dict[str, int] | None) -> dict[str, Observation]:
        numbers = dict.fromkeys(MACHINES) if since is None else past.numbers(MACHINES, since)
        return past.continued({name: own[name].observe(numbers[name]) for name in MACHINES}, since)

    def follow() -> None:
        for machine, seen in look(cursors).items():
            numbers = seen.table()["number"].tolist()
            assert numbers == sorted({*numbers})
            assert seen.lost == 0
            read[machine] += named(seen)
            cursors[machine] = seen.newest
            events = sum(track.events for track in seen.tracks)
            assert events >= counted[machine]
            counted[machine] = events

    for number, events in enumerate(placements):
        own = {machine: Recorder() for machine in MACHINES}
        for sequence, event in enumerate(events):
            if event is None:
                follow()
                continue
            machine, kind, stage = event
            clock += 10
            own[machine].record(own[machine].track(kind, stage), sequence, clock, clock + 3, 5)
            whole[machine].record(whole[machine].track(kind, stage), number * SUBMITTED + sequence, clock, clock + 3, 5)
        expected = {machine: recorder.observe(0) for machine, recorder in whole.items()}
        assert {machine: named(seen) for machine, seen in look({}).items()} == {
            machine: named(seen) for machine, seen in expected.items()
        }
        assert {machine: totals(seen) for machine, seen in look(None).items()} == {
            machine: totals(seen) for machine, seen in expected.items()
        }
        past = Past(look({}), {}, past.first_sequence + SUBMITTED)
    own = {machine: Recorder() for machine in MACHINES}
    follow()
    assert read == {machine: named(seen) for machine, seen in expected.items()}


def test_a_machine_that_left_is_seen_until_its_last_rows_are_read() -> None:
    recorder = Recorder()
    recorder.record(recorder.track(COMPUTE, "x"), 0, 10, 20)
    past = Past({"a": recorder.observe(0)}, {}, 1)
    assert past.continued({}, None) == {}
    (seen,) = past.continued({}, {}).values()
    assert named(seen) == [(COMPUTE, "x", 10, 0)]
    assert past.continued({}, {"a": seen.newest}) == {}
