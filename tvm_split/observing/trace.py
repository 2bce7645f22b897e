"""A trace: the events of a run on all machines and the client, in one clock; saved for viewers and read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rpc_runtime.program.clocks import MachineClock, shifts
from rpc_runtime.program.events import (
    KINDS,
    RECEIVE,
    ROWS,
    SEND,
    Observation,
    Rows,
    TraceEvent,
    Track,
    aligned,
    events_of,
)
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.text import cleaned
from tvm_split import values
from tvm_split.errors import TraceError
from tvm_split.observing.about import About, Name
from tvm_split.outputs import written
from tvm_split.units import Shown, known_names

VERSION = 1
"""The version of the JSON form."""
NOTHING_ABOUT = About()
LATEST = 1 << 62
"""The latest moment, in nanoseconds: differences of two of them still fit 64 bits."""
LONGEST = 9 * 10**15
"""The longest trace, in nanoseconds: TensorBoard's form has 64 bits of picoseconds."""
Nanoseconds = Annotated[int, Field(ge=0, le=LATEST)]


@dataclass(frozen=True, eq=False)
class MachineTrace:
    """The events of one machine, or of the client.

    ``rows`` are an array of `ROWS` in the order in which they were recorded, with times in the trace's clock, which may
    be ``clock_error_nanoseconds`` off. ``lost`` events were overwritten before they were read.
    """

    tracks: tuple[Track, ...]
    rows: Rows
    clock_error_nanoseconds: int = 0
    lost: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MachineTrace) and self._content == other._content

    @property
    def _content(self) -> tuple[object, ...]:
        return self.tracks, self.rows.tobytes(), self.clock_error_nanoseconds, self.lost

    def of_kind(self, *kinds: str, peer: str | None = None) -> Rows:
        """Return the rows of tracks of these kinds; with ``peer`` only those of its links."""
        is_wanted = np.array([track.kind in kinds and peer in (None, track.peer) for track in self.tracks], bool)
        rows: Rows = self.rows[is_wanted[self.rows["track"]]] if len(self.rows) else self.rows
        return rows

    @property
    def ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The times at which the events end, [rows]."""
        ends: np.ndarray[Any, np.dtype[np.int64]] = self.rows["start"] + self.rows["duration"]
        return ends


@dataclass(frozen=True, repr=False)
class Trace(Shown):
    """What ``machines``, and the client, did in a run of ``model``. Iterating yields `TraceEvent` by start time."""

    model: str
    machines: Mapping[str, MachineTrace] = field(repr=False)
    about: About = field(default=NOTHING_ABOUT, repr=False)

    def __iter__(self) -> Iterator[TraceEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return sum(len(machine.rows) for machine in self.machines.values())

    @cached_property
    def events(self) -> tuple[TraceEvent, ...]:
        """All events, by their start."""
        return tuple(self.of_kind(*KINDS))

    def of_kind(self, *kinds: str) -> list[TraceEvent]:
        """Return the events of these kinds, by their start."""
        events = (events_of(name, machine.tracks, machine.of_kind(*kinds)) for name, machine in self.machines.items())
        return sorted((event for some in events for event in some), key=lambda event: event.start_nanoseconds)

    @property
    def begin(self) -> int:
        """When the first event begins, in nanoseconds; 0 without events."""
        return min(
            (int(machine.rows["start"].min()) for machine in self.machines.values() if len(machine.rows)), default=0
        )

    @property
    def lost(self) -> int:
        """The number of events that were overwritten before they were read."""
        return sum(machine.lost for machine in self.machines.values())

    def save(self, path: str | Path) -> None:
        """Write the trace in the form of the path's suffix, one of `FORMATS`.

        Raises:
            TraceError: no form has this suffix, or the package that it needs is missing.
            OutputError: it cannot be written.
        """
        writer = writer_for(path)
        with written(path) as beside:
            writer(self, beside)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Return the trace of a ``.json`` file. Raises `TraceError` for any other file."""
        saved = values.read(_Saved, Path(path), TraceError)
        if saved.version != VERSION:
            raise TraceError(f"{path} is a trace of version {saved.version}; this tvm-split reads version {VERSION}")
        machines = {machine.machine: machine.restored(path) for machine in saved.machines}
        if len(machines) < len(saved.machines):
            raise TraceError(f"{path} has two machines of one name")
        return cls(saved.model, machines, saved.about)


def trace_of(
    model: str, seen: Mapping[str, Observation], clocks: Mapping[str, MachineClock], about: About = NOTHING_ABOUT
) -> Trace:
    """Return the trace of what was observed, with all times in the reader's clock.

    Where a tensor would arrive before it was sent, clocks are moved as little as needed, and their errors are
    increased.
    """
    machines = {}
    for name, observation in seen.items():
        clock, rows = clocks.get(name, MachineClock()), observation.table()
        error = int(clock.errors(rows["start"]).max(initial=0))
        machines[name] = MachineTrace(observation.tracks, aligned(rows, clock), error, observation.lost)
    exact = [name for name, machine in machines.items() if not machine.clock_error_nanoseconds]
    for name, later in shifts(_waits(machines), exact).items():
        rows = machines[name].rows.copy()
        rows["start"] += later
        error = machines[name].clock_error_nanoseconds + abs(later)
        machines[name] = replace(machines[name], rows=rows, clock_error_nanoseconds=error)
    _with_possible_times(machines, exact)
    return Trace(model, machines, about)


def joined(parts: Sequence[Observation]) -> Observation:
    """Return consecutive observations of one machine as a single one, since its host was started for the last time."""
    last = parts[-1]
    parts = [part for part in parts if part.clock_nanoseconds <= last.clock_nanoseconds]
    return replace(last, rows=b"".join(part.rows for part in parts), lost=sum(part.lost for part in parts))


@dataclass(frozen=True)
class Transfers:
    """Tensors that went from ``source`` to ``destination``: the rows of both ends, in the same order, [transfers]."""

    source: str
    destination: str
    tensor: str
    sent: Rows
    received: Rows


def transfers(machines: Mapping[str, MachineTrace]) -> Iterator[Transfers]:
    """Yield the transferred tensors by tensor and link, without transfers of which only one end was recorded."""
    for source, destination, tensor, sent, received in _pairs(machines):
        yield Transfers(source, destination, tensor, machines[source].rows[sent], machines[destination].rows[received])


Places = np.ndarray[Any, np.dtype[np.int64]]


def _pairs(machines: Mapping[str, MachineTrace]) -> Iterator[tuple[str, str, str, Places, Places]]:
    """Yield source, destination, tensor, and the indices of sends and their receives in the rows of both machines."""
    for source, sender in machines.items():
        for number, track in enumerate(sender.tracks):
            receiver = machines.get(track.peer)
            if track.kind != SEND or receiver is None:
                continue
            wanted = (RECEIVE, source, track.tensor)
            others = [place for place, t in enumerate(receiver.tracks) if (t.kind, t.peer, t.tensor) == wanted]
            sent = np.flatnonzero(sender.rows["track"] == number)
            received = np.flatnonzero(np.isin(receiver.rows["track"], others))
            sequences = sender.rows["sequence"][sent], receiver.rows["sequence"][received]
            _, left, right = np.intersect1d(*sequences, return_indices=True)
            if len(left):
                yield source, track.peer, track.tensor, sent[left], received[right]


def _waits(machines: Mapping[str, MachineTrace]) -> Iterator[tuple[str, str, int]]:
    for source, destination, _, sent, received in _pairs(machines):
        waited = machines[destination].ends[received] - machines[source].rows["start"][sent]
        yield source, destination, int(waited.min())


def _with_possible_times(machines: dict[str, MachineTrace], exact: Sequence[str]) -> None:
    """Move, in place, each event that makes a tensor arrive before it is sent; machines in ``exact`` are not changed.

    `shifts` moves whole clocks, but a clock's drift may differ from minute to minute.
    """
    for source, destination, _, sent, received in _pairs(machines):
        lacking = machines[source].rows["start"][sent] - machines[destination].ends[received]
        late, name = lacking > 0, source if destination in exact else destination
        if name in exact or not late.any():
            continue
        rows = machines[name].rows.copy()
        if name == destination:
            rows["start"][received[late]] += lacking[late]
        else:
            rows["start"][sent[late]] -= lacking[late]
        error = machines[name].clock_error_nanoseconds + int(lacking.max())
        machines[name] = replace(machines[name], rows=rows, clock_error_nanoseconds=error)


@dataclass(frozen=True)
class _SavedMachine:
    """A machine in the JSON form; ``columns`` are those of `ROWS`."""

    machine: Name
    tracks: tuple[Track, ...]
    columns: Mapping[str, tuple[int, ...]]
    clock_error_nanoseconds: Nanoseconds = 0
    lost: Annotated[int, Field(ge=0, le=LATEST)] = 0

    def restored(self, path: str | Path) -> MachineTrace:
        """Return the machine's trace. Raises `TraceError` for columns that are no rows."""
        names = ROWS.names or ()
        lengths = {len(column) for column in self.columns.values()}
        if set(self.columns) != set(names) or len(lengths) > 1:
            raise TraceError(f"{path}: the columns of {self.machine!r} should be {', '.join(names)}, equally long")
        rows = np.zeros(max(lengths, default=0), ROWS)
        try:
            for name in names:
                rows[name] = self.columns[name]
        except OverflowError as error:
            raise TraceError(f"{path}: a number of {self.machine!r} in column {name!r} is out of range") from error
        if int(rows["track"].max(initial=0)) >= max(len(self.tracks), 1) or (len(rows) and not self.tracks):
            raise TraceError(f"{path}: an event of {self.machine!r} belongs to none of its {len(self.tracks)} tracks")
        starts, durations = rows["start"], rows["duration"]
        if (durations < 0).any() or (starts < -LATEST).any() or (starts > LATEST - durations).any():
            raise TraceError(f"{path}: an event of {self.machine!r} has an impossible time")
        if len(rows) and int((starts + durations).max()) - int(starts.min()) > LONGEST:
            raise TraceError(f"{path}: the events of {self.machine!r} last longer than a hundred days")
        if unknown := {track.kind for track in self.tracks}.difference(KINDS):
            raise TraceError(f"{path}: {min(unknown)!r} is no kind of event; {known_names(KINDS, min(unknown))}")
        tracks = tuple(
            replace(
                track,
                stage=cleaned(track.stage),
                peer=cleaned(track.peer),
                tensor=cleaned(track.tensor),
                detail=cleaned(track.detail),
            )
            for track in self.tracks
        )
        return MachineTrace(tracks, rows, self.clock_error_nanoseconds, self.lost)


@dataclass(frozen=True)
class _Saved:
    """The JSON form of a trace."""

    version: int
    model: Name
    machines: tuple[_SavedMachine, ...]
    about: About = NOTHING_ABOUT


def _write_json(trace: Trace, path: Path) -> None:
    machines = [
        _SavedMachine(
            name,
            machine.tracks,
            {column: tuple(machine.rows[column].tolist()) for column in ROWS.names or ()},
            machine.clock_error_nanoseconds,
            machine.lost,
        )
        for name, machine in trace.machines.items()
    ]
    content = values.content_of(_Saved(VERSION, trace.model, tuple(machines), trace.about))
    path.write_text(json.dumps(content), encoding="utf-8")


Writer = Callable[[Trace, Path], None]
FORMATS: Mapping[str, tuple[str, str]] = {
    ".json": ("tvm_split.observing.trace:_write_json", "everything; `Trace.load` reads it"),
    ".pftrace": ("tvm_split.observing.perfetto:write", "for ui.perfetto.dev"),
    ".xplane": ("tvm_split.observing.xplane:write", "a folder for TensorBoard's profile plugin"),
    ".html": ("tvm_split.dashboard.page:write", "one file with tables and charts"),
    ".svg": ("tvm_split.pictures.timeline:write", "a picture of the latest micro-batches"),
}
"""Suffix → the function that writes a trace to a path, and what it is for."""


def writer_for(path: str | Path) -> Writer:
    """Return the function that writes a trace to this path. Raises `TraceError` if there is none."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        listed = ", ".join(f"{name} ({use})" for name, (_, use) in FORMATS.items())
        raise TraceError(f"{str(path)!r} has none of the suffixes of a trace: {listed}")
    module, _, name = FORMATS[suffix][0].partition(":")
    try:
        writer: Writer = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        package = error.name or module
        raise TraceError(f"a trace of form {suffix} needs {package}: pip install 'tvm-split[observe]'") from error
    return writer


def machine_order(trace: Trace) -> Sequence[str]:
    """Return the machines' names, the client last."""
    return sorted(trace.machines, key=lambda name: name == CLIENT)
