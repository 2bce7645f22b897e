import pytest
from hypothesis import example, given, strategies as st

from tvm_split.profiling.link_model import (
    WORTHWHILE_SECONDS,
    LinkSample,
    ProbedLink,
    fitted_line,
    probe_sizes,
    transfer_cost,
    worthwhile_size,
)

speeds = st.floats(1e4, 1e10)
latencies = st.floats(0.0, 1.0)


def sample(size: int, bytes_per_second: float, latency: float) -> LinkSample:
    return LinkSample(size, latency + size / bytes_per_second, size / bytes_per_second)


@given(speeds, latencies)
def test_a_line_is_found_again(bytes_per_second: float, latency: float) -> None:
    fitted = fitted_line([sample(size, bytes_per_second, latency) for size in probe_sizes([3_000_000])])
    assert fitted == (pytest.approx(latency, rel=0.01, abs=1e-6), pytest.approx(bytes_per_second, rel=0.01))


@given(st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10))), min_size=2, max_size=3))
@example([(0.0, None), (1e-310, None)])  # one over this is infinite
def test_whatever_was_measured_gives_a_link_that_can_be_planned_with(times: list[tuple[float, float | None]]) -> None:
    latency_seconds, bytes_per_second = fitted_line(
        [LinkSample(size, *time) for size, time in zip((64, 65536, 1 << 20), times, strict=False)]
    )
    assert 0 <= latency_seconds <= 10
    assert 0 < bytes_per_second < float("inf")


def test_one_disturbed_sample_does_no_harm_to_the_bandwidth() -> None:
    good = [sample(size, 1e6, 0.01) for size in (64, 1 << 16, 1 << 20)]
    latency_seconds, bytes_per_second = fitted_line([good[0], LinkSample(1 << 16, 0.09, None), good[2]])
    assert bytes_per_second == pytest.approx(1e6, rel=0.01)
    assert latency_seconds == pytest.approx(0.01, rel=0.01)


def test_a_disturbed_round_trip_makes_no_link_of_endless_bandwidth() -> None:
    """Half a round trip is subtracted from each sample; if it was measured too long, nothing is left."""
    samples = [LinkSample(64, 5e-4, None), LinkSample(1 << 16, 0.0, 4e-4), LinkSample(1 << 20, 0.0, 4e-4)]
    assert fitted_line(samples)[1] <= 4.001 * (1 << 20) / 4e-4


def test_a_link_that_slows_down_in_a_stream_is_as_fast_as_the_stream() -> None:
    samples = [LinkSample(64, 0.0, 0.0), LinkSample(1 << 16, 0.001, 0.01), LinkSample(1 << 20, 0.016, 0.16)]
    assert fitted_line(samples)[1] == pytest.approx(6.55e6, rel=0.01)


@given(speeds, st.floats(0.0, 0.05))
def test_slow_links_are_probed_with_little(bytes_per_second: float, latency: float) -> None:
    samples = [sample(size, bytes_per_second, latency) for size in (64, 1 << 16)]
    size = worthwhile_size(1 << 24, samples)
    if size is None:
        assert latency + (1 << 17) / bytes_per_second > WORTHWHILE_SECONDS * 0.99
    else:
        assert size > 1 << 16
        assert latency + size / bytes_per_second < WORTHWHILE_SECONDS * 1.01


def test_a_transfer_costs_half_of_what_each_end_takes_to_receive_and_send() -> None:
    def probed(seconds_per_byte: float) -> ProbedLink:
        samples = []
        for size in (64, 1 << 16, 1 << 20):
            rise = (size - 64) * seconds_per_byte
            samples.append(LinkSample(size, 0.0, None, 2e-4 + rise, 6e-4 + 2 * rise))
        return ProbedLink(0.0, tuple(samples), "shm")

    cost = transfer_cost(probed(1e-9), probed(3e-9))
    assert cost.transfer_seconds == pytest.approx(1e-4)
    assert cost.transfer_seconds_per_byte == pytest.approx(2e-9)
    assert cost.client_transfer_seconds == pytest.approx(3e-4)
    assert cost.client_transfer_seconds_per_byte == pytest.approx(4e-9)
    assert transfer_cost(probed(-1e-10), probed(-1e-10)).transfer_seconds_per_byte == 0.0
