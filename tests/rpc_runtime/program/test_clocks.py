"""Clocks of other machines: the stated error covers the truth, whatever the offset, the drift and the round trips."""

import numpy as np
from hypothesis import given, strategies as st

from rpc_runtime.program.clocks import ClockSample, MachineClock, shifts

SECOND = 1_000_000_000


@given(
    offset=st.integers(-10 * SECOND, 10 * SECOND),
    drift=st.floats(-200e-6, 200e-6),
    questions=st.lists(st.tuples(*[st.integers(0, SECOND // 50)] * 2, st.integers(0, 20 * SECOND)), min_size=1),
    moments=st.lists(st.integers(0, 100 * SECOND), min_size=1, max_size=5),
)
def test_the_error_covers_the_truth(offset, drift, questions, moments):
    """A round trip is a way there and a way back, which need not be equally long; pauses are between the questions."""

    def machine(reader: int) -> int:
        return reader + offset + round(drift * reader)

    clock, moment = MachineClock(), 0
    for there, back, pause in questions:
        clock.add(ClockSample.of_round_trip(moment, moment + there + back, machine(moment + there)))
        moment += there + back + pause
    times = np.array([machine(moment) for moment in moments], np.int64)
    off = np.abs(clock.of_reader(times) - np.array(moments))
    assert (off <= clock.errors(times) + 2).all()  # two roundings


def test_without_samples_the_clock_is_the_readers():
    times = np.array([1, 1 << 60], np.int64)
    assert MachineClock().of_reader(times).tolist() == times.tolist()
    assert MachineClock().errors(times).tolist() == [0, 0]


def test_memory_is_bounded():
    clock = MachineClock()
    for second in range(0, 200_000, 5):
        clock.add(ClockSample(second * SECOND, 7, 3))
    assert len(clock.samples) <= 1000
    assert clock.samples[0].machine_nanoseconds == 0


waits = st.lists(
    st.tuples(st.sampled_from("abcx"), st.sampled_from("abcx"), st.integers(-100, 100)).filter(lambda w: w[0] != w[1]),
    max_size=6,
)


@given(times=st.fixed_dictionaries({name: st.integers(-50, 50) for name in "abc"}), listed=waits)
def test_no_tensor_arrives_before_it_is_sent(times, listed):
    """The waits are possible in true time; the clocks of a, b and c are wrong, and that of x is kept."""
    wrong = {**times, "x": 0}
    seen = [(source, target, abs(least) + wrong[target] - wrong[source]) for source, target, least in listed]
    later = shifts(seen, fixed="x")
    assert "x" not in later
    for source, target, least in seen:
        assert least + later.get(target, 0) - later.get(source, 0) >= 0
