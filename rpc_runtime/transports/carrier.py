"""What carries a link, the interface of carriers, and the slots for tensors in memory that both ends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rpc_runtime.errors import TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import Bytes, TensorSpec

OnEnd = Callable[[TvmSplitError | None], None]

ALIGNMENT_BYTES = 64
"""Alignment at which TVM uses memory without a copy."""
DEVICE_ONLY: Bytes = np.empty(0, np.uint8)
"""The ``data`` of a slot that is not in host memory; it is never written."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory for one tensor: ``data`` is written to, ``value`` is delivered to the owner."""

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
    """Makes a slot in memory suited to its owner, or over ``memory`` (64-byte-aligned, of the tensor's size)."""

    def __call__(self, tensor: TensorSpec, memory: Bytes | None = None) -> Slot: ...


class Carrier(ABC):
    """Sends the frames of one end of a link to the other end, and passes received frames to the link.

    It takes the frames to send from `LinkEnd.frames` in a thread of its own, or its `wake` calls `LinkEnd.drain`.
    """

    joins_frames = False
    """Whether small frames that wait are sent in one message."""

    def slots(self, route: Route) -> Sequence[Slot]:
        """Return ``route.depth`` slots in memory that both ends share, or () if tensors are sent in frames."""
        return ()

    def accept(self) -> Carrier:
        """Return itself: a carrier that is ready before the caller chooses is its own `Pending`."""
        return self

    @abstractmethod
    def start(self, on_end: OnEnd) -> None:
        """Open the link by `LinkEnd.open` and pass received frames to it. Call once.

        ``on_end(error)`` is called at most once, if the link ends without `close`; None: the other end closed it.

        Raises:
            TvmSplitError: the two ends cannot be connected after all; the link has then failed.
        """

    def wake(self) -> None:  # noqa: B027  (most have a thread that waits)
        """Called when there may be a message to send: by any thread, without the link's lock. Must not raise."""

    @abstractmethod
    def close(self) -> None:
        """End the link and join its threads, for 5 s at most. Idempotent; may be called before `start`."""


class Pending(Protocol):
    """A carrier that the called end prepares before the caller has chosen its transport."""

    def accept(self) -> Carrier:
        """Return the carrier, after the caller has chosen this transport.

        Raises:
            TvmSplitError: the caller does not connect.
        """
        ...

    def close(self) -> None:
        """Free what `accept` did not take. Idempotent."""
        ...


def failure_of(error: Exception) -> TvmSplitError:
    """Return the error with which a link fails, for any error in one of its threads."""
    if isinstance(error, TvmSplitError):
        return error
    return WorkerUnavailableError(str(error)) if isinstance(error, OSError) else WorkerError(f"{error!r}")
