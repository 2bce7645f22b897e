"""Timeouts and liveness check of the two ends of a connection.

If a cable is cut or the other process is stopped, a connection stays open for minutes. gRPC's own pings would notice,
but they queue behind data in the socket's buffer, so that a slow link would seem dead. Here each end sends at least one
frame per heartbeat interval, and any received frame proves that its sender is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""A function that returns monotonic seconds, such as `time.monotonic`."""


@dataclass(frozen=True)
class LinkTimeouts:
    """How long the ends of a link wait for each other.

    ``silence_seconds`` is the time of the longest frame (1 MiB) on the slowest supported link (256 KiB/s).

    Args:
        beat_seconds: heartbeat interval: each end sends at least one frame in this time.
        silence_seconds: an end is considered dead if nothing was received from it for this time.
        choice_seconds: time limit for the caller to choose a transport.
        handshake_seconds: time limit for the handshake of a transport.
    """

    beat_seconds: float = 1.0
    silence_seconds: float = 4.0
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


class Liveness:
    """Liveness of the other end of a connection, which is never considered silent before its first frame."""

    def __init__(self, timeouts: LinkTimeouts, clock: Clock = time.monotonic) -> None:
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
        return now - self._heard > self._timeouts.silence_seconds
