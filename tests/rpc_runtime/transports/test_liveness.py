import pytest

from rpc_runtime.transports.liveness import LinkTimeouts, Liveness, MeasuredLiveness, WatchTimeouts


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_counts_from_the_last_word_without_the_time_in_which_this_process_was_stopped() -> None:
    """`test_transports` has the other end stand still, and say nothing but heartbeats."""
    clock = Clock()
    liveness = Liveness(LinkTimeouts(beat_seconds=1.0, silence_seconds=4.0), clock)
    clock.now += 60.0
    assert not liveness.is_silent(clock.now - 1.0)  # before the first word
    liveness.hear()
    clock.now += 30.0
    assert not liveness.is_silent(clock.now - 30.0)
    clock.now += 3.9
    assert not liveness.is_silent(clock.now - 1.0)
    clock.now += 0.2
    assert liveness.is_silent(clock.now - 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_silence_is_longer_than_nothing(seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        LinkTimeouts.of_silence(seconds)


@pytest.mark.parametrize(
    ("load", "seconds"), [(0.0, 1.0), (1.0, 1.0), (5.0, 3.0), (1e9, 12.0), (float("inf"), 12.0), (float("nan"), 1.0)]
)
def test_a_busy_host_may_be_silent_for_longer(load: float, seconds: float) -> None:
    clock = Clock()
    liveness = MeasuredLiveness(WatchTimeouts(silence_seconds=1.0), clock)
    liveness.hear(load)
    clock.now += seconds - 0.1
    assert not liveness.is_silent(clock.now - 0.1)
    clock.now += 0.2
    assert liveness.is_silent(clock.now - 0.1)
    liveness.hear(load=0.0)  # it was silent for this long once, and is not busy now
    clock.now += 3 * seconds
    assert not liveness.is_silent(clock.now - 0.1)
    clock.now += 0.5
    assert liveness.is_silent(clock.now - 0.1)
