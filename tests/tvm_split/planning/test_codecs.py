"""The choice of codecs, from numbers written by hand."""

from hypothesis import given, strategies as st

from rpc_runtime.program.codecs import CODECS, NONE
from tests.helpers.placement.predictions import machine_prediction, prediction
from tvm_split.planning.codec_trials import CodecTrial
from tvm_split.planning.codecs import LEAST_GAIN, fastest, may_limit

MEGABYTE = 1_000_000
PLAIN = CodecTrial("cut", NONE, MEGABYTE, MEGABYTE)


@given(
    trials=st.lists(
        st.builds(
            CodecTrial,
            tensor=st.just("cut"),
            codec=st.sampled_from([*CODECS]),
            size_bytes=st.just(MEGABYTE),
            encoded_bytes=st.integers(1, MEGABYTE),
            encode_seconds=st.floats(0, 1),
            decode_seconds=st.floats(0, 1),
            output_error=st.floats(0, 1),
        )
    ),
    bytes_per_second=st.floats(1e3, 1e12),
    largest_error=st.floats(0, 1),
)
def test_nothing_allowed_is_faster_by_more_than_the_least_gain(
    trials: list[CodecTrial], bytes_per_second: float, largest_error: float
) -> None:
    chosen = fastest(PLAIN, trials, bytes_per_second, largest_error)
    assert not CODECS[chosen.codec].is_lossy or chosen.output_error <= largest_error
    assert chosen.seconds(bytes_per_second) <= PLAIN.seconds(bytes_per_second)
    for trial in trials:
        if not CODECS[trial.codec].is_lossy or trial.output_error <= largest_error:
            seconds = trial.seconds(bytes_per_second)
            assert chosen.seconds(bytes_per_second) * (1 - LEAST_GAIN) <= seconds * (1 + 1e-12)


def test_a_link_limits_where_its_ends_send_or_receive_longer_than_any_computes() -> None:
    computes = prediction((machine_prediction("a", 0.010), machine_prediction("b", 0.002, receive_seconds=0.009)))
    assert not may_limit(computes, "throughput", "a", "b")
    assert may_limit(computes, "latency", "a", "b")
    assert may_limit(None, "throughput", "a", "b")
    receives = prediction((machine_prediction("a", 0.010), machine_prediction("b", 0.002, receive_seconds=0.011)))
    assert may_limit(receives, "throughput", "a", "b")
    assert not may_limit(receives, "throughput", "b", "client")
    sends = prediction((machine_prediction("a", 0.010, send_seconds=0.02), machine_prediction("b", 0.002)))
    assert may_limit(sends, "throughput", "a", "client")
