"""What the earlier placements of a deployment have recorded: its readers see one series of events.

Rows, sequence numbers and totals of each placement count from 0. Here they go on where those before it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rpc_runtime.program.clocks import MachineClock
from rpc_runtime.program.events import RING_ROWS, ROWS, Observation, Track

NOTHING = Observation((), b"", 0, 0, 0)
TOTALS = ("events", "nanoseconds", "size_bytes")
LAST_TRACK = np.iinfo(ROWS["track"]).max


@dataclass(frozen=True)
class Past:
    """The recordings of earlier placements by machine, each as one; sequence numbers go on from ``first_sequence``."""

    seen: Mapping[str, Observation] = field(default_factory=dict)
    clocks: Mapping[str, MachineClock] = field(default_factory=dict)
    first_sequence: int = 0

    def numbers(self, machines: Iterable[str], since: Mapping[str, int]) -> dict[str, int | None]:
        """Return the present placement's numbers of rows with these numbers, by machine."""
        return {name: max(since.get(name, 0) - self.seen.get(name, NOTHING).newest, 0) for name in machines}

    def continued(self, news: Mapping[str, Observation], since: Mapping[str, int] | None) -> dict[str, Observation]:
        """Return what the present placement has recorded as the end of what the deployment has, by machine.

        With ``since``, earlier rows after these numbers come first, also of machines that have left.
        """
        answers = {}
        for machine in {**news, **(self.seen if since is not None else {})}:
            past = self.seen.get(machine, NOTHING)
            new = news.get(machine, replace(past, tracks=(), rows=b"", newest=0, lost=0))
            answer = _continued(past, new, self.first_sequence, None if since is None else since.get(machine, 0))
            if machine in news or answer.rows:
                answers[machine] = answer
        return answers


def _continued(past: Observation, new: Observation, first_sequence: int, since: int | None) -> Observation:
    tracks = {_names(track): replace(track, median_nanoseconds=0.0, value=0) for track in past.tracks}
    for track in new.tracks:
        before = tracks.get(_names(track), Track(track.kind))
        sums = {total: getattr(before, total) + getattr(track, total) for total in TOTALS}
        tracks[_names(track)] = replace(track, **sums)
    places = {names: place for place, names in enumerate(tracks)}
    own = np.array([places[_names(track)] for track in new.tracks], np.int64).clip(max=LAST_TRACK)
    rows, unread = new.table().copy(), past.table()
    rows["track"] = own[rows["track"]]
    rows["number"] += past.newest
    rows["sequence"] += first_sequence
    is_wanted = since is not None and new.clock_nanoseconds >= past.clock_nanoseconds  # else its host was started again
    unread = unread[(unread["number"] > (since or 0)) & is_wanted][-RING_ROWS:]
    lost = 0 if since is None else new.lost + max(past.newest - since, 0) - len(unread)
    both, newest = unread.tobytes() + rows.tobytes(), past.newest + new.newest
    return replace(new, tracks=tuple(tracks.values()), rows=both, newest=newest, lost=lost)


def _names(track: Track) -> tuple[str, str, str, str, str]:
    return track.kind, track.stage, track.peer, track.tensor, track.detail
