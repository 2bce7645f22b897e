"""The interface of NCCL and of a station's GPU that the NCCL transport uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.program import TensorSpec

UNIQUE_ID_BYTES = 128
"""``NCCL_UNIQUE_ID_BYTES``."""


class Communicator(Protocol):
    """A communicator of two ranks. Each method raises a `WorkerError` if NCCL has failed."""

    def is_ready(self) -> bool:
        """Return whether both ranks have joined, and the operation begun last was submitted to the device."""

    def send(self, address: int, size_bytes: int) -> None:
        """Begin to send. Requires `is_ready`."""

    def receive(self, address: int, size_bytes: int) -> None:
        """Begin to receive. Requires `is_ready`."""

    def is_done(self) -> bool:
        """Return whether the operation begun last has ended."""

    def abort(self) -> None:
        """Abort the communicator and its operations in flight. May take long."""


class NcclDevice(Protocol):
    """NCCL on a station's GPU. ``version`` is NCCL's number, ``gpu`` a globally unique name of the GPU, ``turn`` the
    lock of this process for one transfer at a time."""

    version: int
    gpu: str
    turn: threading.Lock

    def unique_id(self) -> bytes:
        """Return the id by which two ranks find each other; this process then listens for them."""

    def communicator(self, unique_id: bytes, rank: int) -> Communicator:
        """Return a new communicator, which is not ready yet."""

    def memory(self, tensor: TensorSpec) -> tuple[int, Any]:
        """Allocate GPU memory for a tensor; return its address and the value to deliver to a station."""

    def address(self, value: Any) -> int: ...


MakeNccl = Callable[[], NcclDevice]
"""Returns the NCCL device; the first call loads NCCL's library. Raises `WorkerError` if it cannot be used."""


def nccl_of(make: MakeNccl | None) -> NcclDevice:
    """Return NCCL on the GPU of a link's station.
    Raises:
        WorkerError: the station has no GPU, or NCCL's library cannot be used.
    """
    if make is None:
        raise WorkerError("its stages are on no GPU")
    return make()


def version_text(number: int) -> str:
    """Format NCCL's version number: 22703 is 2.27.3."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
