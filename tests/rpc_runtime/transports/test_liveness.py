from __future__ import annotations

import pytest

from rpc_runtime.transports.liveness import LinkTimeouts, Liveness


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def silent_after(seconds: float, clock: Clock, liveness: Liveness) -> bool:
    """Return whether the other end counts as silent after so many seconds, checked at each heartbeat interval."""
    end = clock.now + seconds
    while True:
        since = clock.now
        clock.now = min(since + 1.0, end)
        silent = liveness.is_silent(since)
        if silent or clock.now == end:
            return silent


def test_nobody_is_silent_before_the_first_word() -> None:
    clock = Clock()
    assert not silent_after(60.0, clock, Liveness(LinkTimeouts(), clock))


@pytest.mark.parametrize(("seconds", "silent"), [(3.9, False), (4.1, True)])
def test_silence_counts_from_the_last_word(seconds: float, silent: bool) -> None:
    clock = Clock()
    liveness = Liveness(LinkTimeouts(beat_seconds=1.0, silence_seconds=4.0), clock)
    liveness.hear()
    assert not silent_after(3.0, clock, liveness)
    liveness.hear()
    assert silent_after(seconds, clock, liveness) == silent


def test_the_time_in_which_this_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    liveness = Liveness(LinkTimeouts(beat_seconds=1.0, silence_seconds=4.0), clock)
    liveness.hear()
    since = clock.now
    clock.now += 30.0
    assert not liveness.is_silent(since)
    assert silent_after(4.1, clock, liveness)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_silence_is_longer_than_nothing(seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        LinkTimeouts.of_silence(seconds)
