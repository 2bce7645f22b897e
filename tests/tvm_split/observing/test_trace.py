"""Traces: one clock for all machines, what limits, and files that other programs read."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from rpc_runtime.program.events import BLOCK, COMPUTE, FLIGHT, RECEIVE, ROWS, SEND, WAIT, WINDOW, Recorder
from tests.helpers.traces_of_runs import COUNT, MILLISECOND, A, B, two_machines
from tvm_split.errors import TraceError
from tvm_split.observing import xplane_pb2
from tvm_split.observing.about import About, AboutStage
from tvm_split.observing.lanes import in_lanes
from tvm_split.observing.summary import common, length, spans_of, summary_of
from tvm_split.observing.trace import Trace, trace_of


def test_the_shares_of_the_time():
    summary = summary_of(two_machines())
    first, second = summary.machines
    # From the first computing, at 100 ms, to the last one's end, at 100 + 190 + 6 + 1 + 9 ms.
    wall = (10 * (COUNT - 1) + 16) / 1000
    assert first.wall_seconds == second.wall_seconds == pytest.approx(wall)
    assert (first.micro_batches, second.micro_batches) == (COUNT, COUNT)
    assert first.compute_seconds == pytest.approx(COUNT * 0.006)
    assert (first.block_seconds, first.wait_seconds) == (pytest.approx(COUNT * 0.004), 0)
    assert (second.block_seconds, second.wait_seconds) == (0, pytest.approx((COUNT - 1) * 0.001))
    assert first.bubble == pytest.approx(1 - COUNT * 0.006 / wall)
    # The machine receives before it computes and sends after it: nothing overlaps. The other sends while it receives.
    # The first tensor is received before the time that counts, and the last wait is after it.
    assert (first.transfer_seconds, first.overlap) == (pytest.approx(COUNT * 0.002 - 0.001), 0)
    links = {(link.source, link.destination): link for link in summary.links}
    assert (links[A, B].transfers, links[A, B].size_bytes) == (COUNT, COUNT * 1000)
    assert links[A, B].share == pytest.approx(COUNT * 0.001 / wall)


@pytest.mark.parametrize(
    ("computing", "wire", "limit"),
    [
        ((6, 9), 1, "Limited by machine-b: it computes"),
        ((9, 6), 1, "Limited by machine-a: it computes"),
        ((1, 1), 9, "Limited by the link"),
        ((2, 2), 1, "Limited by the link"),
    ],
)
def test_what_limits_is_said_first(computing, wire, limit):
    assert limit in summary_of(two_machines(computing, wire)).limit
    assert limit in str(two_machines(computing, wire))


def test_no_share_is_above_the_whole():
    """A transfer before the first computing, of a thousand times its time, is not counted."""
    recorders = {name: Recorder() for name in (A, B)}
    recorders[A].record(recorders[A].track(SEND, "first", B, "x"), 0, 0, 10**9, 100)
    recorders[B].record(recorders[B].track(RECEIVE, "second", A, "x"), 0, 0, 10**9, 100)
    recorders[B].record(recorders[B].track(COMPUTE, "second"), 0, 10**9, 10**9 + 10**6)
    summary = summary_of(trace_of("net", {name: own.observe(since=0) for name, own in recorders.items()}, {}))
    assert all(0 <= link.share <= 1 for link in summary.links)
    assert all(0 <= machine.compute_share <= 1 for machine in summary.machines)
    assert summary.limiting == (B,)


def test_a_link_whose_tensors_wait_in_buffers():
    """A slow wire that no end sees: one machine waits for the other, which is blocked by it."""
    recorders = {name: Recorder() for name in (A, B)}

    def record(machine: str, kind: str, begin: int, end: int, peer: str = "", tensor: str = "") -> None:
        own = recorders[machine]
        own.record(own.track(kind, "stage", peer, tensor), number, begin * MILLISECOND, end * MILLISECOND, 4)

    for number in range(COUNT):
        start = 50 * number
        record(A, COMPUTE, start, start + 5)
        record(A, SEND, start + 5, start + 6, B, "x")
        record(A, BLOCK, start + 6, start + 50, B)
        record(B, WAIT, start + 5, start + 45, A)
        record(B, RECEIVE, start + 44, start + 45, A, "x")
        record(B, COMPUTE, start + 45, start + 50)
    trace = trace_of("net", {name: own.observe(since=0) for name, own in recorders.items()}, {})
    assert summary_of(trace).limiting == (A, B)


@pytest.mark.parametrize("blocked", [False, True])
def test_nothing_is_busy_all_the_time(blocked: bool):
    """A machine that is blocked gets enough micro-batches from the client."""
    recorder = Recorder()
    for number in range(COUNT):
        start = 5 * number * MILLISECOND
        recorder.record(recorder.track(COMPUTE, "stage"), number, start, start + MILLISECOND)
        if blocked:
            recorder.record(recorder.track(BLOCK, "stage", B), number, start + MILLISECOND, start + 4 * MILLISECOND)
    summary = summary_of(trace_of("net", {A: recorder.observe(since=0)}, {}))
    assert summary.limiting == ()
    assert "Nothing is busy all the time" in summary.limit
    assert ("The client feeds too few" in summary.limit) is not blocked


def test_an_empty_trace():
    trace = Trace("net", {})
    assert (len(trace), trace.events, summary_of(trace).limit) == (0, (), "Nothing was computed.")
    assert "net" in str(trace)


spans = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), max_size=12)


@given(spans, spans)
def test_unions_and_intersections(left, right):
    def rows(listed):
        table = np.zeros(len(listed), ROWS)
        for row, (start, duration) in zip(table, listed, strict=True):
            row["start"], row["duration"] = start, duration
        return table

    def moments(listed):
        return {moment for start, duration in listed for moment in range(start, start + duration)}

    one, other = spans_of(rows(left)), spans_of(rows(right))
    assert length(one) * 1e9 == pytest.approx(len(moments(left)))
    assert length(common(one, other)) * 1e9 == pytest.approx(len(moments(left) & moments(right)))


def test_what_is_saved_is_read_back(tmp_path: Path):
    trace = two_machines()
    trace.save(tmp_path / "run.json")
    again = Trace.load(tmp_path / "run.json")
    assert (again.events, str(again)) == (trace.events, str(trace))


def damaged(name: str, path: Path) -> None:
    content = json.loads(path.read_text())
    machine = content["machines"][0]
    match name:
        case "version":
            content["version"] = 99
        case "lengths":
            machine["columns"]["start"].pop()
        case "column":
            machine["columns"]["begin"] = machine["columns"].pop("start")
        case "track":
            machine["columns"]["track"][0] = 999
        case "tracks":
            machine["tracks"] = []
        case "kind":
            machine["tracks"][0]["kind"] = "recieve"
        case "range":
            machine["columns"]["value"][0] = 1 << 70
        case "duration":
            machine["columns"]["duration"][0] = -1
        case "time":
            machine["columns"]["start"][0] = (1 << 63) - 1
        case "early":
            machine["columns"]["start"][0] = -(1 << 63)
        case "long":
            machine["columns"]["start"][0] = 10**16
        case "error":
            machine["clock_error_nanoseconds"] = 10**400
        case "names":
            content["machines"].append(machine)
        case "text":
            machine["columns"]["value"][0] = "many"
    path.write_text(json.dumps(content) if name != "cut" else json.dumps(content)[:200])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("version", "version 99"),
        ("lengths", "equally long"),
        ("column", "columns of 'machine-a'"),
        ("track", "belongs to none"),
        ("tracks", "belongs to none"),
        ("kind", "did you mean 'receive'"),
        ("range", "out of range"),
        ("duration", "impossible time"),
        ("time", "impossible time"),
        ("early", "impossible time"),
        ("long", "a hundred days"),
        ("error", "clock_error_nanoseconds"),
        ("names", "two machines of one name"),
        ("text", "must be a whole number"),
        ("cut", "run.json"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, message: str):
    path = tmp_path / "run.json"
    two_machines().save(path)
    damaged(name, path)
    with pytest.raises(TraceError, match=message):
        Trace.load(path)


def test_names_of_a_file_cannot_control_a_terminal(tmp_path: Path):
    path = tmp_path / "run.json"
    two_machines().save(path)
    path.write_text(path.read_text().replace("machine-a", "box\\u001b[31m\\n").replace('"net"', '"net\\u001b]0;x"'))
    text = str(Trace.load(path))
    assert "box" in text
    assert "\x1b" not in text


def test_events_of_a_lane_do_not_overlap():
    """Flights of several micro-batches overlap, and get lanes of their own."""
    trace = two_machines()
    for name in trace.machines:
        lanes = in_lanes(event for event in trace if event.machine == name)
        for events in lanes.values():
            for earlier, later in itertools.pairwise(events):
                assert earlier.end_nanoseconds <= later.start_nanoseconds
    assert {"flight", "flight 2"} <= set(in_lanes(event for event in trace if event.kind == FLIGHT))


def test_perfetto(tmp_path: Path):
    trace = two_machines()
    trace.save(tmp_path / "run.pftrace")
    packets = perfetto_trace_pb2.Trace.FromString((tmp_path / "run.pftrace").read_bytes()).packet
    processes = [p.track_descriptor.process.process_name for p in packets if p.track_descriptor.HasField("process")]
    assert processes == ["machine-a", "machine-b", "client"]
    descriptors = [p.track_descriptor for p in packets if p.HasField("track_descriptor")]
    assert len({descriptor.uuid for descriptor in descriptors}) == len(descriptors)
    begins = [p for p in packets if p.track_event.type == p.track_event.TYPE_SLICE_BEGIN]
    ends = [p for p in packets if p.track_event.type == p.track_event.TYPE_SLICE_END]
    assert len(begins) == len(ends) == sum(event.kind != WINDOW for event in trace)
    flows: dict[str, list[int]] = {kind: [] for kind in (SEND, RECEIVE, COMPUTE)}
    for packet in begins:
        for kind in set(flows) & set(packet.track_event.categories):
            flows[kind] += packet.track_event.flow_ids
    between = set(flows[SEND]) & set(flows[RECEIVE])
    assert len([number for number in between if number not in flows[COMPUTE]]) == 3 * COUNT
    assert set(flows[COMPUTE]) <= set(flows[RECEIVE]) & set(flows[SEND])


def test_kernels_are_inside_of_their_computing(tmp_path: Path):
    """A kernel has the names of the layers of that call, or of its function where these are not known."""
    recorder = Recorder()
    for start, end, function, call in ((1, 3, "conv", 0), (3, 4, "copy", 0), (5, 8, "conv", 1), (8, 9, "conv", 2)):
        recorder.record(recorder.kernel_track("one", function), 7, start, end, value=call)
    recorder.record(recorder.track(COMPUTE, "one"), 7, 0, 10)
    recorder.happened("failed: a cause")
    stage = AboutStage("one", "box", (), {"conv": ("features.0, relu", "features.3")})
    trace = trace_of("net", {"box": recorder.observe(since=0)}, {}, About((stage,)))
    trace.save(tmp_path / "run.pftrace")
    packets = perfetto_trace_pb2.Trace.FromString((tmp_path / "run.pftrace").read_bytes()).packet
    events = sorted((p for p in packets if p.HasField("track_event")), key=lambda packet: packet.timestamp)
    begins = [p.track_event for p in events if p.track_event.type == p.track_event.TYPE_SLICE_BEGIN]
    assert [event.name for event in begins] == ["one 7", "features.0, relu", "copy", "features.3", "conv"]
    assert len({event.track_uuid for event in begins}) == 1
    (failure,) = (p.track_event for p in events if p.track_event.type == p.track_event.TYPE_INSTANT)
    assert failure.name == "failed: a cause"
    trace.save(tmp_path / "run.xplane")
    (file,) = (tmp_path / "run.xplane").glob("plugins/profile/net/*.pb")
    (plane,) = xplane_pb2.XSpace.FromString(file.read_bytes()).planes
    titles = {about.name for about in plane.event_metadata.values()}
    assert {"compute one", "kernel features.0, relu", "kernel copy", "deployment failed: a cause"} <= titles


def test_tensorboard(tmp_path: Path):
    trace = two_machines()
    trace.save(tmp_path / "run.xplane")
    files = sorted((tmp_path / "run.xplane" / "plugins" / "profile" / "net").glob("*.xplane.pb"))
    spaces = [xplane_pb2.XSpace.FromString(file.read_bytes()) for file in files]
    assert sorted(space.hostnames[0] for space in spaces) == ["client", "machine-a", "machine-b"]
    events = [event for space in spaces for plane in space.planes for line in plane.lines for event in line.events]
    assert len(events) == sum(event.kind != WINDOW for event in trace)
    computed = sum(event.end_nanoseconds - event.start_nanoseconds for event in trace if event.kind == COMPUTE)
    found = []
    for (plane,) in (space.planes for space in spaces):
        computing = {number for number, about in plane.event_metadata.items() if about.name.startswith("compute")}
        found += [e.duration_ps for line in plane.lines for e in line.events if e.metadata_id in computing]
    assert sum(found) == computed * 1000
