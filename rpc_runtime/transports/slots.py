"""Memory for one tensor, as those who write it and those who compute with it see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.runner import Bytes

ALIGNMENT_BYTES = 64
"""Where TVM takes memory as it is."""
NOT_OF_THE_HOST: Bytes = np.empty(0, np.uint8)
"""Nobody writes to it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory for one tensor: ``data`` to write it to, ``value`` to hand on."""

    data: Bytes
    value: Any

    def copy_in(self, value: Any) -> None:
        """Copies such a value as this one."""
        self.data[:] = flat_bytes(value)

    def send(self, value: Any, header: bytes) -> Iterator[bytes]:
        """Brings such a value to the other end; yields the ``header``, and what else is to be said, when it is time."""
        self.copy_in(value)
        yield header

    def wait(self) -> None:
        """Returns when the tensor of which the other end has told is here."""


class MakeSlot(Protocol):
    """Makes memory for one tensor, fit for its station, or sees ``memory`` as one: 64-byte-aligned, of its size."""

    def __call__(self, tensor: TensorSpec, memory: Bytes | None = None) -> Slot: ...
