"""How long the two ends of a connection wait for each other, and whether the other end still lives.

A connection whose cable is cut, or whose other end is stopped, stays open for minutes. gRPC's own pings would tell, but
they wait behind the data in the socket's buffer, so that a slow link would seem dead. Here each end says something at
least once in a beat, and whatever arrives counts as life.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Returns seconds that never go back, such as `time.monotonic`."""


@dataclass(frozen=True)
class LinkTimeouts:
    """How long the ends of a link wait for each other.

    ``silence_seconds`` is what the longest frame, 1 MiB, takes over the slowest link that is meant to work, 256 KiB/s.

    Args:
        beat_seconds: each end says something at least so often.
        silence_seconds: an end of which nothing was heard for so long is dead.
        choice_seconds: the caller chooses a transport within this time.
        handshake_seconds: both ends exchange within this time what a transport needs.
    """

    beat_seconds: float = 1.0
    silence_seconds: float = 4.0
    choice_seconds: float = 10.0
    handshake_seconds: float = 5.0

    @classmethod
    def of_silence(cls, seconds: float) -> LinkTimeouts:
        """The usual timeouts with another silence, and a beat to match.

        Raises:
            ValueError: ``seconds`` is not more than 0.
        """
        if not seconds > 0:
            raise ValueError(f"a connection is silent for more than 0 seconds before it is dead, got {seconds:g}")
        return cls(beat_seconds=seconds / 4, silence_seconds=seconds)


USUAL_TIMEOUTS = LinkTimeouts()


class Liveness:
    """Whether the other end of a connection lives; it is not silent before it was heard for the first time."""

    def __init__(self, timeouts: LinkTimeouts, clock: Clock = time.monotonic) -> None:
        self._timeouts = timeouts
        self.clock = clock
        self._heard: float | None = None

    def hear(self) -> None:
        """Something has arrived."""
        self._heard = self.clock()

    def is_silent(self, since: float) -> bool:
        """Whether nothing has arrived for too long, after a wait for it of one beat that began at ``since``.

        A wait that took longer says that this process itself was stopped: the other end then gets its whole time again.
        """
        here = self.clock()
        if self._heard is None:
            return False
        if here - since > 2 * self._timeouts.beat_seconds:
            self._heard = here
        return here - self._heard > self._timeouts.silence_seconds
