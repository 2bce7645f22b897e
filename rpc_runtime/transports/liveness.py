"""Timeouts and liveness check of the two ends of a connection.

If a cable is cut or the other process is stopped, a connection stays open for minutes. gRPC's own pings would notice,
but they queue behind data in the socket's buffer, so that a slow link would seem dead. Here each end sends at least one
frame per heartbeat interval, and any received frame proves that its sender is alive.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

Clock = Callable[[], float]
"""A function that returns monotonic seconds, such as `time.monotonic`."""


@dataclass(frozen=True)
class LinkTimeouts:
    """How long the ends of a link wait for each other.

    ``silence_seconds`` is twice the time of the longest frame (1 MiB) on the slowest supported link (256 KiB/s). A dead
    machine is noticed sooner (`WatchTimeouts`); this is for a network that is cut between two machines only.

    Args:
        beat_seconds: heartbeat interval: each end sends at least one frame in this time.
        silence_seconds: an end is considered dead if nothing was received from it for this time.
        choice_seconds: time limit for the caller to choose a transport.
        handshake_seconds: time limit for the handshake of a transport.
    """

    beat_seconds: float = 1.0
    silence_seconds: float = 8.0
    choice_seconds: float = 10.0
    handshake_seconds: float = 5.0

    @classmethod
    def of_silence(cls, seconds: float) -> LinkTimeouts:
        """Return the default timeouts with this ``silence_seconds`` and a heartbeat interval of a quarter of it.

        Raises:
            ValueError: ``seconds`` is not more than 0.
        """
        if not seconds > 0:
            raise ValueError(f"a connection is silent for more than 0 seconds before it is dead, got {seconds:g}")
        return cls(beat_seconds=seconds / 4, silence_seconds=seconds)


USUAL_TIMEOUTS = LinkTimeouts()


@dataclass(frozen=True)
class WatchTimeouts:
    """How soon a client notices that a worker hangs, has no power, or is behind a cut cable.

    A worker sends an event each ``beat_seconds``. One that is silent for ``silence_seconds`` is asked on a new
    connection. It has failed if it does not answer within ``answer_seconds``, and no event arrives meanwhile.
    ``silence_of`` has the machines that may be silent for another time.
    """

    beat_seconds: float = 0.25
    silence_seconds: float = 1.0
    answer_seconds: float = 1.0
    silence_of: Mapping[str, float] = field(default_factory=dict)

    def of(self, machine: str) -> WatchTimeouts:
        """Return the timeouts of one machine."""
        return replace(self, silence_seconds=self.silence_of.get(machine, self.silence_seconds))


USUAL_WATCH = WatchTimeouts()


class Liveness:
    """Liveness of the other end of a connection, which is never considered silent before its first frame."""

    def __init__(self, timeouts: LinkTimeouts | WatchTimeouts, clock: Clock = time.monotonic) -> None:
        self._timeouts = timeouts
        self.clock = clock
        self._heard: float | None = None

    def hear(self) -> None:
        """Record that something was received now."""
        self._heard = self.clock()

    def is_silent(self, since: float) -> bool:
        """Return whether nothing was received for too long. Call it after waiting one interval from ``since``.

        A longer wait means that this process itself was stopped: the timeout of the other end then starts again.
        """
        now = self.clock()
        if self._heard is None:
            return False
        if now - since > 2 * self._timeouts.beat_seconds:
            self._heard = now
        return now - self._heard > self.limit_seconds

    @property
    def limit_seconds(self) -> float:
        """How long the other end may be silent."""
        return self._timeouts.silence_seconds

    @property
    def silent_seconds(self) -> float:
        """For how long nothing was received; 0 before the first frame."""
        return 0.0 if self._heard is None else self.clock() - self._heard


class MeasuredLiveness(Liveness):
    """Liveness by the gaps between frames: a busy host whose frames come late is given more time.

    The limit is `GAPS` times the longest gap of the last `GAP_MEMORY_SECONDS`, if that is more than the timeout. Before
    there was one, the sender's load tells what is to be expected.
    """

    def __init__(self, timeouts: LinkTimeouts | WatchTimeouts, clock: Clock = time.monotonic) -> None:
        super().__init__(timeouts, clock)
        self._gaps: deque[tuple[float, float]] = deque()
        """(time, length) of gaps, each longer than all later ones."""
        self._expected_gap = 0.0

    def hear(self, load: float = 0.0) -> None:
        """Record that something was received now, and the load of the sender's host for each of its cores."""
        self._expected_gap = min(GAP_SECONDS_OF_LOAD * load, LONGEST_EXPECTED_GAP_SECONDS)
        before = self._heard
        super().hear()
        if before is not None and self._heard is not None:
            gap = self._heard - before
            while self._gaps and self._gaps[-1][1] <= gap:
                self._gaps.pop()
            self._gaps.append((self._heard, gap))

    @property
    def limit_seconds(self) -> float:
        return max(super().limit_seconds, GAPS * self.longest_gap_seconds)

    @property
    def longest_gap_seconds(self) -> float:
        """The longest gap that was seen, or is expected."""
        while self._gaps and self._gaps[0][0] < self.clock() - GAP_MEMORY_SECONDS:
            self._gaps.popleft()
        return max(self._expected_gap, self._gaps[0][1] if self._gaps else 0.0)


GAPS = 3
"""With one, an event 2.5 s late, on two cores with 20 busy processes, counted as a failure."""
GAP_MEMORY_SECONDS = 60.0
GAP_SECONDS_OF_LOAD = 0.2
"""At a load of 18 a core, threads that sleep for 1 ms were late by up to 4 s; without this, 6 of 110 new deployments
counted a machine as lost at loads of 12 to 20 a core, and with half of it, one did within an hour at 16 a core."""
LONGEST_EXPECTED_GAP_SECONDS = 4.0
