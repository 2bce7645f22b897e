"""Write a trace for TensorBoard's profile plugin: a folder with a file per machine, ``plugins/profile/RUN/MACHINE``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rpc_runtime.program.events import WINDOW, TraceEvent, events_of
from tvm_split.observing import xplane_pb2 as pb
from tvm_split.observing.lanes import in_lanes, title_of
from tvm_split.observing.trace import Trace

PLANE = "/host:CPU"
"""The name of a plane of which the plugin shows every line."""
STATS = {"micro_batch": 1, "bytes": 2}
PICOSECONDS = 1000
"""Per nanosecond."""


def write(trace: Trace, folder: Path) -> None:
    """Write the files of all machines."""
    run = folder / "plugins" / "profile" / _file_name(trace.model)
    run.mkdir(parents=True)
    layers = trace.about.layers_of_kernels()
    for number, (name, machine) in enumerate(trace.machines.items()):
        events = [event for event in events_of(name, machine.tracks, machine.rows) if event.kind != WINDOW]
        space = pb.XSpace(planes=[_plane(events, trace.begin, layers)], hostnames=[name])
        # Two machines whose names differ only in other letters get two files.
        (run / f"{_file_name(name)}.{number}.xplane.pb").write_bytes(space.SerializeToString())


def _plane(
    events: Iterable[TraceEvent], origin: int, layers: Mapping[tuple[str, str, str], Sequence[str]]
) -> pb.XPlane:
    plane = pb.XPlane(id=1, name=PLANE)
    for name, number in STATS.items():
        plane.stat_metadata[number].id, plane.stat_metadata[number].name = number, name
    kinds: dict[str, int] = {}
    for place, (lane, own) in enumerate(in_lanes(events).items(), 1):
        line = plane.lines.add(id=place, name=lane, timestamp_ns=origin)
        for event in own:
            title = f"{event.kind} {title_of(event, layers) or event.stage or event.tensor}".strip()
            kind = kinds.setdefault(title, len(kinds) + 1)
            added = line.events.add(
                metadata_id=kind,
                offset_ps=(event.start_nanoseconds - origin) * PICOSECONDS,
                duration_ps=(event.end_nanoseconds - event.start_nanoseconds) * PICOSECONDS,
            )
            added.stats.add(metadata_id=STATS["micro_batch"], uint64_value=event.sequence)
            added.stats.add(metadata_id=STATS["bytes"], uint64_value=event.size_bytes)
    for title, kind in kinds.items():
        plane.event_metadata[kind].id, plane.event_metadata[kind].name = kind, title
    return plane


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:100] or "trace"
