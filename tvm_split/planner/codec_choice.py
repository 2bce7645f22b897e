"""Choose the codec of a tensor on a link from measured sizes, times and errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rpc_runtime.program.codecs import CODECS
from tvm_split.planner.prediction import Prediction

LEAST_GAIN = 0.05
"""Share of a tensor's transfer time that a codec must save; a smaller gain is below the noise of measurements."""


@dataclass(frozen=True)
class CodecTrial:
    """The result of a codec on one micro-batch of a tensor.

    ``output_error`` is the largest difference that this codec alone makes to an output of the model, as a share of
    that output's largest magnitude; 0 for a lossless codec.
    """

    tensor: str
    codec: str
    size_bytes: int
    encoded_bytes: int
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    output_error: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes without the codec, divided by bytes with it."""
        return self.size_bytes / self.encoded_bytes if self.encoded_bytes else 1.0

    def seconds(self, bytes_per_second: float) -> float:
        """Seconds to encode, send and decode the tensor over a link of this bandwidth, without the link's latency."""
        return self.encode_seconds + self.encoded_bytes / bytes_per_second + self.decode_seconds


@dataclass(frozen=True)
class PlannedCodec:
    """The codec of the tensor of this name on the link from one machine (or the client) to another.

    ``ratio`` and ``output_error`` are those of a `CodecTrial` on the model's example inputs; None where no trial was
    possible, except for the ratio of a lossy codec, which is the same for all values.
    """

    tensor: str
    source: str
    destination: str
    codec: str
    ratio: float | None = None
    output_error: float | None = None

    def __post_init__(self) -> None:
        CODECS[self.codec]


def fastest(
    plain: CodecTrial, trials: Iterable[CodecTrial], bytes_per_second: float, largest_error: float
) -> CodecTrial:
    """The trial that transfers a tensor fastest, among those that change outputs by at most ``largest_error``.

    ``plain`` is the tensor without a codec; it is returned unless a codec saves more than `LEAST_GAIN` of its time.
    """
    allowed = [trial for trial in trials if trial.output_error <= largest_error or not CODECS[trial.codec].is_lossy]
    best = min(allowed, key=lambda trial: trial.seconds(bytes_per_second), default=plain)
    worth = best.seconds(bytes_per_second) < (1 - LEAST_GAIN) * plain.seconds(bytes_per_second)
    return best if worth else plain


def may_limit(prediction: Prediction | None, objective: str, source: str, destination: str) -> bool:
    """Whether the plan might be better if this link took less time.

    Always true for latency, or without a prediction. For throughput it is true if the source takes longer to send, or
    the destination longer to receive, than the slowest machine takes to compute.
    """
    if prediction is None or objective == "latency":
        return True
    slowest = max(machine.compute_seconds for machine in prediction.machines)
    return any(
        (machine.machine == source and machine.send_seconds > slowest)
        or (machine.machine == destination and machine.receive_seconds > slowest)
        for machine in prediction.machines
    )
