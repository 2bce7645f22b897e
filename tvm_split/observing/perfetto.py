"""Write a trace for Perfetto (https://ui.perfetto.dev): a process per machine, a track per computing thread and link.

See https://perfetto.dev/docs/reference/synthetic-track-event for the messages. Arrows (flows) go from a send to its
receive, and inside a machine from the receive to the computing and on to the send of the same micro-batch.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from rpc_runtime.program.events import COMPUTE, DEPLOYMENT, KERNEL, RECEIVE, SEND, WINDOW, TraceEvent, events_of
from tvm_split.observing.lanes import COMPUTING, in_lanes, title_of
from tvm_split.observing.trace import MachineTrace, Trace, machine_order
from tvm_split.units import seconds_text

SEQUENCE = 1
"""Perfetto's number of the writer of all packets."""
MONOTONIC, BOOTTIME = 3, 6
"""Perfetto's numbers of clocks; boot time is that of its time axis."""
FIRST_PROCESS = 1
Layers = Mapping[tuple[str, str, str], Sequence[str]]


def write(trace: Trace, path: Path) -> None:
    with path.open("wb") as file:
        for packet in _packets(trace):
            packet.trusted_packet_sequence_id = SEQUENCE
            file.write(pb.Trace(packet=[packet]).SerializeToString())


def _packets(trace: Trace) -> Iterator[pb.TracePacket]:
    first = pb.TracePacket(first_packet_on_sequence=True, sequence_flags=pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
    for clock in (MONOTONIC, BOOTTIME):
        first.clock_snapshot.clocks.add(clock_id=clock, timestamp=max(trace.begin, 0))
    yield first
    numbers, layers = itertools.count(1), trace.about.layers_of_kernels()
    for process, name in enumerate(machine_order(trace), FIRST_PROCESS):
        yield from _machine(name, trace.machines[name], process, numbers, layers)


def _machine(
    name: str, machine: MachineTrace, process: int, numbers: Iterator[int], layers: Layers
) -> Iterator[pb.TracePacket]:
    own = next(numbers)
    error = seconds_text(machine.clock_error_nanoseconds * 1e-9)
    packet = pb.TracePacket()
    packet.track_descriptor.uuid = own
    packet.track_descriptor.process.pid, packet.track_descriptor.process.process_name = process, name
    packet.track_descriptor.description = f"clock right to {error}; {machine.lost} events lost"
    yield packet
    computing = 0
    for lane, events in in_lanes(events_of(name, machine.tracks, machine.rows)).items():
        track, counter, kind = next(numbers), next(numbers), events[0].kind
        if lane == COMPUTING:
            computing = track
        if kind == KERNEL and computing:
            track = computing
        elif kind != WINDOW:
            yield _descriptor(own, track, lane)
        for event in events if kind != WINDOW else ():
            yield from _slice(event, track, layers)
        if kind in (SEND, RECEIVE, WINDOW):
            tensor = f"{events[0].tensor}, {'to' if kind == SEND else 'from'} {events[0].peer}"
            yield _descriptor(
                own, counter, f"{'window of' if kind == WINDOW else 'under way'} {tensor}", is_counter=True
            )
            for event in events:
                yield _counted(event, counter)


def _descriptor(parent: int, number: int, title: str, *, is_counter: bool = False) -> pb.TracePacket:
    packet = pb.TracePacket()
    packet.track_descriptor.uuid, packet.track_descriptor.parent_uuid = number, parent
    packet.track_descriptor.name = title
    if is_counter:
        packet.track_descriptor.counter.unit_name = "micro-batches"
    return packet


def _slice(event: TraceEvent, track: int, layers: Layers) -> Iterator[pb.TracePacket]:
    kinds = [pb.TrackEvent.TYPE_SLICE_BEGIN, pb.TrackEvent.TYPE_SLICE_END]
    if event.kind == DEPLOYMENT:
        kinds = [pb.TrackEvent.TYPE_INSTANT]
    packets = [pb.TracePacket(timestamp_clock_id=MONOTONIC) for _ in kinds]
    for packet, moment, kind in zip(packets, (event.start_nanoseconds, event.end_nanoseconds), kinds, strict=False):
        packet.timestamp = max(moment, 0)
        packet.track_event.type, packet.track_event.track_uuid = kind, track
    slice_ = packets[0].track_event
    name = f"{event.stage if event.kind == COMPUTE else event.kind} {event.sequence}"
    slice_.name = title_of(event, layers) or name
    slice_.categories.append(event.kind)
    slice_.flow_ids.extend(_flows(event))
    notes = {"micro_batch": event.sequence, "bytes": event.size_bytes}
    for name, number in notes.items():
        slice_.debug_annotations.add(name=name, uint_value=number)
    for name, text in (
        ("stage", event.stage),
        ("peer", event.peer),
        ("tensor", event.tensor),
        (event.kind, event.detail),
    ):
        if text:
            slice_.debug_annotations.add(name=name, string_value=text)
    yield from packets


def _flows(event: TraceEvent) -> Iterator[int]:
    """Yield the numbers of the arrows that begin or end at an event."""
    if event.kind in (SEND, RECEIVE):
        ends = (event.machine, event.peer) if event.kind == SEND else (event.peer, event.machine)
        yield _number("transfer", *ends, event.tensor, event.sequence)
    if event.kind in (SEND, RECEIVE, COMPUTE) and event.stage:
        yield _number("stage", event.machine, event.stage, event.sequence)


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") or 1


def _counted(event: TraceEvent, track: int) -> pb.TracePacket:
    packet = pb.TracePacket(timestamp=max(event.end_nanoseconds, 0), timestamp_clock_id=MONOTONIC)
    packet.track_event.type, packet.track_event.track_uuid = pb.TrackEvent.TYPE_COUNTER, track
    packet.track_event.counter_value = event.value
    return packet
