"""What a link by NCCL asks of a station's GPU, and of NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.program import TensorSpec

UNIQUE_ID_BYTES = 128
"""``NCCL_UNIQUE_ID_BYTES``."""


class Communicator(Protocol):
    """Of two ranks. Each raises a `WorkerError` where NCCL has failed."""

    def is_ready(self) -> bool:
        """Whether both have joined it, and what was begun is with the device."""

    def send(self, address: int, size_bytes: int) -> None:
        """Begins to, when it is ready."""

    def receive(self, address: int, size_bytes: int) -> None:
        """Begins to, when it is ready."""

    def is_done(self) -> bool:
        """Whether what was begun last has ended."""

    def abort(self) -> None:
        """Ends it, with what is under way. May take long."""


class NcclDevice(Protocol):
    """NCCL with a station's GPU. ``version`` is as NCCL writes it, ``gpu`` a name that no other one in the world has;
    ``turn`` is this process's."""

    version: int
    gpu: str
    turn: threading.Lock

    def unique_id(self) -> bytes:
        """By which two ranks find each other: this process listens for them from now on."""

    def communicator(self, unique_id: bytes, rank: int) -> Communicator:
        """One that is not ready yet."""

    def memory(self, tensor: TensorSpec) -> tuple[int, Any]:
        """Of the GPU: its address, and what a station takes."""

    def address(self, value: Any) -> int: ...


MakeNccl = Callable[[], NcclDevice]
"""Raises a `WorkerError` where NCCL's library cannot be used. The first call loads it."""


def nccl_of(make: MakeNccl | None) -> NcclDevice:
    """NCCL with the GPU of a link's station.

    Raises:
        WorkerError: the station has no GPU, or NCCL's library cannot be used.
    """
    if make is None:
        raise WorkerError("its stages are on no GPU")
    return make()


def version_text(number: int) -> str:
    """22703 as people write it: 2.27.3."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
