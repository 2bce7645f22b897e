"""Tries codecs on a model's own values: runs a program's stages here, and encodes and decodes transferred tensors."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rpc_runtime.execution.in_process import InProcessRunner
from rpc_runtime.program.codecs import CODECS, NONE
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import TensorSpec

FEWEST_ROUNDS, MOST_ROUNDS = 3, 50
ROUNDS_SECONDS = 0.02
"""Seconds for which a codec is timed."""


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


class CodecTrials:
    """Runs a program without replicas on one micro-batch of ``inputs``, with and without codecs."""

    def __init__(self, program: Program, blob_path: Callable[[str], Path], inputs: Sequence[np.ndarray]) -> None:
        self._inputs = inputs
        self._codecs: Mapping[str, str] = {}
        self.transferred: dict[str, np.ndarray] = {}
        """Transferred tensors without codecs, by name."""
        self._pipeline = InProcessRunner(program, blob_path, on_transfer=self._transfer)
        self._outputs = self._pipeline.run(inputs)

    def _transfer(self, route: Route, array: np.ndarray) -> np.ndarray:
        name = route.tensor.name
        self.transferred.setdefault(name, array)
        codec = self._codecs.get(name, NONE)
        return array if codec == NONE else passed(codec, route.tensor, array)

    def trial(self, tensor: TensorSpec, codec: str) -> CodecTrial:
        """Return sizes, times and, for a lossy codec, the output error of one codec on one transferred tensor."""
        array = self.transferred[tensor.name]
        coded = CODECS[codec](tensor)
        data = flat_bytes(array)
        encoded = coded.to_wire(data)
        memory = np.empty_like(data)
        return CodecTrial(
            tensor.name,
            codec,
            data.size,
            encoded.size,
            _median_seconds(lambda: coded.to_wire(data)),
            _median_seconds(lambda: coded.from_wire(encoded, memory)),
            self.output_error({tensor.name: codec}) if CODECS[codec].is_lossy else 0.0,
        )

    def output_error(self, codecs: Mapping[str, str]) -> float:
        """Return the largest output error of ``codecs`` (by tensor name) together, relative to the largest output."""
        self._codecs = codecs
        try:
            outputs = self._pipeline.run(self._inputs)
        finally:
            self._codecs = {}
        return max(map(_relative_error, outputs, self._outputs), default=0.0)

    def close(self) -> None:
        self._pipeline.close()


def passed(codec: str, tensor: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Return the array that a receiver gets over a link with this codec; shape and dtype are those of ``array``.

    If the codec cannot represent one of the values, the tensor is sent unencoded, so all values arrive exactly.
    """
    coded, arrived = CODECS[codec](tensor), np.empty_like(array)
    coded.from_wire(coded.to_wire(flat_bytes(array)), flat_bytes(arrived))
    return arrived


def _median_seconds(call: Callable[[], Any]) -> float:
    times: list[float] = []
    while len(times) < FEWEST_ROUNDS or (len(times) < MOST_ROUNDS and sum(times) < ROUNDS_SECONDS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _relative_error(actual: np.ndarray, exact: np.ndarray) -> float:
    approximate, reference = actual.astype(np.float64), exact.astype(np.float64)
    equal = (approximate == reference) | (np.isnan(approximate) & np.isnan(reference))
    if equal.all():
        return 0.0
    gap = np.abs(approximate - reference)[~equal]
    largest = np.abs(reference[np.isfinite(reference)]).max(initial=0.0)
    return float(gap.max() / largest) if largest > 0 and np.isfinite(gap).all() else float("inf")
