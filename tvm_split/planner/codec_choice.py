"""Which codec a tensor gets on its way over a link: numbers in, the choice out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rpc_runtime.program.codec import is_lossy, require_known
from tvm_split.planner.prediction import Prediction

LEAST_GAIN = 0.05
"""What a codec has to save of a tensor's time: less, no measurement of either can be sure of."""


@dataclass(frozen=True)
class CodecTrial:
    """What a codec did to one micro-batch of a tensor.

    ``output_error`` is the largest difference that it alone makes to an output of the model, as a share of that
    output's largest magnitude; 0 for what loses nothing.
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
        """How many times as many bytes there would be without it."""
        return self.size_bytes / self.encoded_bytes if self.encoded_bytes else 1.0

    def seconds(self, bytes_per_second: float) -> float:
        """From one end to the other of a link of this speed, without its latency."""
        return self.encode_seconds + self.encoded_bytes / bytes_per_second + self.decode_seconds


@dataclass(frozen=True)
class PlannedCodec:
    """A tensor of this name that goes from one machine (or the client) to another, and how it is written there.

    ``ratio`` and ``output_error`` are those of a `CodecTrial` on the model's example inputs; None where nothing could
    be tried, but for the ratio of a lossy codec, which is the same for all values.
    """

    tensor: str
    source: str
    destination: str
    codec: str
    ratio: float | None = None
    output_error: float | None = None

    def __post_init__(self) -> None:
        require_known(self.codec)


def fastest(
    plain: CodecTrial, trials: Iterable[CodecTrial], bytes_per_second: float, largest_error: float
) -> CodecTrial:
    """What takes a tensor over a link soonest, among what changes outputs by ``largest_error`` at most.

    ``plain`` is the tensor without a codec, which it stays unless that takes longer by `LEAST_GAIN`.
    """
    allowed = [trial for trial in trials if trial.output_error <= largest_error or not is_lossy(trial.codec)]
    best = min(allowed, key=lambda trial: trial.seconds(bytes_per_second), default=plain)
    worth = best.seconds(bytes_per_second) < (1 - LEAST_GAIN) * plain.seconds(bytes_per_second)
    return best if worth else plain


def may_limit(prediction: Prediction | None, objective: str, source: str, destination: str) -> bool:
    """Whether the plan would be better if this link took less time.

    For latency it always is. For throughput, unless computing takes longest, than all that its source sends and than
    all that its destination receives as well.
    """
    if prediction is None or objective == "latency":
        return True
    slowest = max(machine.compute_seconds for machine in prediction.machines)
    return any(
        (machine.machine == source and machine.send_seconds > slowest)
        or (machine.machine == destination and machine.receive_seconds > slowest)
        for machine in prediction.machines
    )
