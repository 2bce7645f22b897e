from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from tvm_split.profiling.link_model import (
    LARGEST_BYTES,
    LEAST_LARGEST_BYTES,
    WORTHWHILE_SECONDS,
    ChainCost,
    ChainSample,
    LinkLine,
    LinkSample,
    StreamCost,
    StreamSample,
    chain_cost,
    fitted_line,
    handed_on_bytes,
    in_chain,
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
    """Half a round trip is subtracted from each sample; if it was measured too long, nothing is left."""
    samples = [LinkSample(64, 5e-4, None), LinkSample(1 << 16, 0.0, 4e-4), LinkSample(1 << 20, 0.0, 4e-4)]
    assert fitted_line(samples).bytes_per_second <= 4.001 * (1 << 20) / 4e-4


def test_a_link_that_slows_down_in_a_stream_is_as_fast_as_the_stream() -> None:
    samples = [LinkSample(64, 0.0, 0.0), LinkSample(1 << 16, 0.001, 0.01), LinkSample(1 << 20, 0.016, 0.16)]
    assert fitted_line(samples).bytes_per_second == pytest.approx(6.55e6, rel=0.01)


@pytest.mark.parametrize(
    ("tensor_sizes", "largest"),
    [([], LEAST_LARGEST_BYTES), ([10, 2000], LEAST_LARGEST_BYTES), ([3_000_000], 1 << 22), ([1 << 30], LARGEST_BYTES)],
)
def test_the_largest_size_to_probe(tensor_sizes: list[int], largest: int) -> None:
    assert probe_sizes(tensor_sizes)[-1] == largest


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
    cost = stream_cost(samples)
    assert cost.ratio == pytest.approx(1.1)
    assert cost.seconds == pytest.approx(0.001)
    assert stream_cost([StreamSample(0.003, 0.003, 0.003), StreamSample(0.015, 0.015, 0.012)]) == StreamCost(0.0, 1.0)


def test_waking_is_what_a_run_takes_beyond_computing_and_a_round_trip():
    samples = [StreamSample(0.003, 0.004, 0.0043), StreamSample(0.015, 0.017, 0.0175)]
    assert waking_seconds(samples, 0.0006) == pytest.approx(0.0007)
    assert waking_seconds(samples, 0.01) == 0.0


def chain_of(machines: int) -> list[ChainSample]:
    """Return samples: a hop takes 0.3 ms, and 0.2 ms of the cores at each end; a kilobyte more 0.01, and 0.02 ms."""
    hops = machines + 1

    def sample(size_bytes: int) -> ChainSample:
        kilobytes = size_bytes / 1000
        busy = hops * 2 * (0.2e-3 + kilobytes * 0.02e-3)
        return ChainSample(size_bytes, hops * (0.3e-3 + kilobytes * 0.01e-3), busy / 2, busy)

    return [sample(1), sample(8001)]


@pytest.mark.parametrize("machines", [3, 8])
def test_what_a_chain_takes_of_its_cores_and_what_a_single_hop_does(machines: int) -> None:
    cost = chain_cost(chain_of(machines), machines)
    assert cost.transfer_seconds == pytest.approx(0.2e-3, rel=1e-3)
    assert cost.transfer_seconds_per_byte == pytest.approx(0.02e-6)
    assert cost.hop_seconds == pytest.approx(0.3e-3, rel=1e-3)
    assert cost.hop_seconds_per_byte == pytest.approx(0.01e-6)


def test_a_chain_without_large_tensors_says_nothing_of_bytes() -> None:
    cost = chain_cost(chain_of(3)[:1], 3)
    assert (cost.transfer_seconds_per_byte, cost.hop_seconds_per_byte) == (0.0, 0.0)


def test_a_chain_says_what_its_hops_take_together_and_slow_links_among_them_stay_slow() -> None:
    chain = ChainCost(1e-4, 0.0, 3e-3, 1e-9)
    near, far = LinkLine(1e-4, 1e10), LinkLine(3.9e-3, 1e6)
    assert in_chain(near, [near, far], chain) == LinkLine(pytest.approx(1.1e-3), pytest.approx(1e9))
    assert in_chain(far, [near, far], chain) == LinkLine(pytest.approx(4.9e-3), pytest.approx(1e6))
    disturbed = LinkLine(3.1e-2, 1e10)
    hop_seconds = [in_chain(line, [near, disturbed], chain).latency_seconds for line in (near, disturbed)]
    assert sum(hop_seconds) == pytest.approx(6e-3)
    assert hop_seconds[0] == pytest.approx(hop_seconds[1] / 310)


def test_links_that_are_alike_by_themselves_are_equal_in_a_chain() -> None:
    """A plan takes as long as the chain, in whatever order it uses the machines."""
    ways = [LinkLine(seconds, 1e10) for seconds in (57e-6, 80e-6, 106e-6)]
    for hop in (1e-4, 3e-5):
        chain = ChainCost(1e-4, 0.0, hop, 1e-9)
        assert [in_chain(way, ways, chain).latency_seconds for way in ways] == pytest.approx([hop] * 3)


@pytest.mark.parametrize(
    ("tensor_sizes", "size"),
    [
        ([], 0),
        ([256] * 9, 0),
        ([256, 200_704, 200_704], 1 << 18),
        ([1, 1, 1 << 15], 1 << 16),
        ([1 << 30], LARGEST_BYTES),
    ],
)
def test_the_size_that_is_handed_on_is_a_middle_one(tensor_sizes: list[int], size: int) -> None:
    assert handed_on_bytes(tensor_sizes) == size


def test_a_stream_is_not_much_slower_than_one_by_one():
    # As once measured on a disturbed machine: a network would have had results every 98 ms, and one alone in 24.5 ms.
    disturbed = [StreamSample(0.003, 0.0035, 0.0035), StreamSample(0.015, 0.0155, 0.0515)]
    cost = stream_cost(disturbed)
    assert cost.seconds + cost.ratio * 0.015 <= 1.1 * 0.0155 * (1 + 1e-9)
    assert cost.ratio < 1.2
