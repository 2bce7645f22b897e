"""Slots: memory for one tensor, with one view to write to and one to compute with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.runner import Bytes

ALIGNMENT_BYTES = 64
"""Alignment at which TVM uses memory without a copy."""
NOT_OF_THE_HOST: Bytes = np.empty(0, np.uint8)
"""The ``data`` of a slot that is not in host memory; it is never written."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory for one tensor: ``data`` is written to, ``value`` is delivered to the station."""

    data: Bytes
    value: Any

    def copy_in(self, value: Any) -> None:
        """Copy a tensor of the same kind into this slot."""
        self.data[:] = flat_bytes(value)

    def send(self, value: Any, header: bytes) -> Iterator[bytes]:
        """Transfer a tensor to the other end; yield the frames to send: the ``header``, and possibly heartbeats."""
        self.copy_in(value)
        yield header

    def wait(self) -> None:
        """Wait until the announced tensor has arrived in this slot."""


class MakeSlot(Protocol):
    """Makes a slot in memory suited to its station, or over ``memory``: 64-byte-aligned, of the tensor's size."""

    def __call__(self, tensor: TensorSpec, memory: Bytes | None = None) -> Slot: ...
