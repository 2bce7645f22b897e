from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from tvm_split.measuring.link_samples import (
    LARGEST_BYTES,
    LEAST_LARGEST_BYTES,
    WORTHWHILE_SECONDS,
    CrowdSample,
    LinkSample,
    StreamCost,
    StreamSample,
    crowd_cost,
    fitted_line,
    probe_sizes,
    stream_cost,
    waking_seconds,
    worthwhile_size,
)

speeds = st.floats(1e4, 1e10)
latencies = st.floats(0.0, 1.0)


def sample(size: int, bytes_per_second: float, latency: float) -> LinkSample:
    return LinkSample(size, latency + size / bytes_per_second, size / bytes_per_second)


@given(speeds, latencies)
def test_a_line_is_found_again(bytes_per_second: float, latency: float) -> None:
    line = fitted_line([sample(size, bytes_per_second, latency) for size in probe_sizes([3_000_000])])
    assert line.bytes_per_second == pytest.approx(bytes_per_second, rel=0.01)
    assert line.latency_seconds == pytest.approx(latency, rel=0.01, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10))), min_size=2, max_size=3))
@example([(0.0, None), (1e-310, None)])  # one over this is infinite
def test_whatever_was_measured_gives_a_link_that_can_be_planned_with(times: list[tuple[float, float | None]]) -> None:
    line = fitted_line([LinkSample(size, *time) for size, time in zip((64, 65536, 1 << 20), times, strict=False)])
    assert 0 <= line.latency_seconds <= 10
    assert 0 < line.bytes_per_second < float("inf")


def test_one_disturbed_sample_does_no_harm_to_the_bandwidth() -> None:
    good = [sample(size, 1e6, 0.01) for size in (64, 1 << 16, 1 << 20)]
    line = fitted_line([good[0], LinkSample(1 << 16, 0.09, None), good[2]])
    assert line.bytes_per_second == pytest.approx(1e6, rel=0.01)
    assert line.latency_seconds == pytest.approx(0.01, rel=0.01)


def test_a_disturbed_round_trip_makes_no_link_of_endless_bandwidth() -> None:
    """Half a round trip is taken off each sample; measured too long, it leaves nothing."""
    samples = [LinkSample(64, 5e-4, None), LinkSample(1 << 16, 0.0, 4e-4), LinkSample(1 << 20, 0.0, 4e-4)]
    assert fitted_line(samples).bytes_per_second <= 4.001 * (1 << 20) / 4e-4


def test_a_link_that_slows_down_in_a_stream_is_as_fast_as_the_stream() -> None:
    samples = [LinkSample(64, 0.0, 0.0), LinkSample(1 << 16, 0.001, 0.01), LinkSample(1 << 20, 0.016, 0.16)]
    assert fitted_line(samples).bytes_per_second == pytest.approx(6.55e6, rel=0.01)


@pytest.mark.parametrize(
    ("wanted", "largest"),
    [([], LEAST_LARGEST_BYTES), ([10, 2000], LEAST_LARGEST_BYTES), ([3_000_000], 1 << 22), ([1 << 30], LARGEST_BYTES)],
)
def test_the_largest_size_to_probe(wanted: list[int], largest: int) -> None:
    assert probe_sizes(wanted)[-1] == largest


@given(speeds, st.floats(0.0, 0.05))
def test_slow_links_are_probed_with_little(bytes_per_second: float, latency: float) -> None:
    samples = [sample(size, bytes_per_second, latency) for size in (64, 1 << 16)]
    size = worthwhile_size(1 << 24, samples)
    if size is None:
        assert latency + (1 << 17) / bytes_per_second > WORTHWHILE_SECONDS * 0.99
    else:
        assert size > 1 << 16
        assert latency + size / bytes_per_second < WORTHWHILE_SECONDS * 1.01


def test_a_stream_costs_so_much_per_micro_batch_and_so_much_of_computing():
    samples = [StreamSample(0.003, 0.004, 0.0043), StreamSample(0.015, 0.017, 0.0175)]
    found = stream_cost(samples)
    assert found.ratio == pytest.approx(1.1)
    assert found.seconds == pytest.approx(0.001)
    assert stream_cost([StreamSample(0.003, 0.003, 0.003), StreamSample(0.015, 0.015, 0.012)]) == StreamCost(0.0, 1.0)


def test_waking_is_what_a_run_takes_beyond_computing_and_a_round_trip():
    samples = [StreamSample(0.003, 0.004, 0.0043), StreamSample(0.015, 0.017, 0.0175)]
    assert waking_seconds(samples, 0.0006) == pytest.approx(0.0007)
    assert waking_seconds(samples, 0.01) == 0.0


def test_what_a_crowd_takes_of_its_cores_and_what_a_single_hop_does():
    """Three stages on two cores: a product takes 1 ms, a beginning 0.5, a hop 0.3, in a stream a tensor's end 0.1."""
    machines, cores, hops = 3, 2, 4

    def sample(products: int) -> CrowdSample:
        computed = machines * (products * 1e-3 + 0.5e-3)
        return CrowdSample(products, computed, computed + hops * 0.3e-3)

    found = crowd_cost(2 * hops * 0.1e-3 / cores, [sample(5), sample(1)], machines, cores)
    assert found.transfer_seconds == pytest.approx(0.1e-3)
    beside = replace(sample(1), period_seconds=(machines * 1e-3 + 2 * hops * 0.2e-3) / cores)
    assert crowd_cost(1e-6, [sample(5), beside], machines, cores).transfer_seconds == pytest.approx(0.2e-3)
    assert crowd_cost(1.0, [sample(5), beside], machines, cores).transfer_seconds == cores / (2 * hops)
    assert found.hop_seconds == pytest.approx(0.3e-3 + machines * 0.5e-3 / hops)
    assert crowd_cost(1e-3, [CrowdSample(1, 0.01, 0.001), sample(5)], machines, cores).hop_seconds >= 0.0


def test_a_stream_is_not_much_slower_than_one_by_one():
    # As once measured on a disturbed machine: a network would have had results every 98 ms, and one alone in 24.5 ms.
    disturbed = [StreamSample(0.003, 0.0035, 0.0035), StreamSample(0.015, 0.0155, 0.0515)]
    found = stream_cost(disturbed)
    assert found.seconds + found.ratio * 0.015 <= 1.1 * 0.0155 * (1 + 1e-9)
    assert found.ratio < 1.2
    assert [each.is_contradictory for each in disturbed] == [False, True]
