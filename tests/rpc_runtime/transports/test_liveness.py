import pytest

from rpc_runtime.transports.liveness import LinkTimeouts, Liveness


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
