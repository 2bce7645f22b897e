"""Transfers to and from a GPU that overlap with computing and with each other: three micro-batches at once.

    receive 3   a link's thread writes it to page-locked memory and begins its upload ──▶ event
    compute 2   the computing thread starts after the events of its inputs, and waits until it is done
    send 1      a link's thread downloads it to page-locked memory, waits for that, and sends it

Nothing synchronizes the whole device: each step waits only for what it needs. Memory is not reused too early:

- A received tensor keeps its slot and its memory on the device until the stages that read it have ended, which is after
  its upload. The credit and the device memory are returned together. If a program ends earlier, `close` waits for its
  uploads.
- A stage's outputs are complete before they are passed on. The sender holds a tensor until it was downloaded.
- If an output is a view of an input, the stage copies it (`LoadedStage`), because the input's memory is reused.

This module manages order and memory; the calls to the device are in `cuda_calls`.
"""

import contextlib
import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import tvm

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.cuda_calls import CudaCalls, Event, memory_at
from rpc_runtime.execution.cuda_code import installed_folders
from rpc_runtime.execution.cuda_runtime import runtime_library
from rpc_runtime.execution.loaded_stage import TensorSlot, find_device, first_line, size_of, tensor_slot
from rpc_runtime.processes import do_all
from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import Bytes, StageSpec, TensorSpec
from rpc_runtime.transports.carrier import Slot
from rpc_runtime.transports.link_end import LinkOwner

Tensor = Any


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A tensor on the device, complete when ``event`` has completed."""

    tensor: Tensor
    event: Event


class DeviceTransfers:
    """Transfers to and from one GPU, in memory that is reused; the links' `Device`. Thread-safe.

    Call ``close`` at the end: it waits for uploads in flight, whose memory must not be freed before.
    """

    def __init__(self, calls: CudaCalls, make_tensor: Callable[[TensorSpec], Tensor]) -> None:
        self.calls, self._make_tensor = calls, make_tensor
        self.library = nvidia_library
        self._lock = threading.Lock()
        self._under_way: dict[Event, tuple[Uploaded, Tensor]] = {}
        """Uploaded tensors with their sources, by event, until `give_back`."""
        self._closed = False
        self._on_device: defaultdict[str, list[Uploaded]] = defaultdict(list)
        self._on_host: defaultdict[int, list[tuple[Bytes, Event]]] = defaultdict(list)
        self._end = calls.event()

    def slot(self, tensor: TensorSpec, memory: Bytes | None = None) -> Slot:
        """Return a slot in host memory (page-locked unless ``memory`` is given) that device tensors are copied to."""
        seen = tensor_slot(tensor, self.calls.host_memory(tensor.size_bytes) if memory is None else memory)
        return _Slot(seen.data, seen.value, self, self.calls.event())

    def upload(self, tensor: TensorSpec, value: Tensor) -> Uploaded | None:
        """Begin to copy a host tensor, which must not change; return the tensor on the device, None after `close`."""
        with self._lock:
            if self._closed:
                return None
            free = self._on_device[tensor.name]
            uploaded = free.pop() if free else Uploaded(self._make_tensor(tensor), self.calls.event())
            self._under_way[uploaded.event] = uploaded, value
            self.calls.upload(value.data_ptr(), uploaded.tensor.data_ptr(), tensor.size_bytes, uploaded.event)
        return uploaded

    def give_back(self, tensor: TensorSpec, uploaded: Uploaded) -> None:
        """Make the memory of an uploaded tensor reusable, after all stages that read it have ended."""
        with self._lock:
            self._under_way.pop(uploaded.event, None)
            if not self._closed:
                self._on_device[tensor.name].append(uploaded)

    def close(self) -> None:
        """Stop uploads, wait for those in flight, and drop their memory. Idempotent.

        Raises:
            WorkerError: the device fails; the first error, after waiting for all uploads. A second call does not raise.
        """
        with self._lock:
            self._closed = True
            under_way, self._under_way = self._under_way, {}
            error = do_all(partial(self.calls.wait, event) for event in under_way)
            self._on_device.clear()
        if error is not None:
            raise error

    def download(self, value: Tensor, data: Bytes, event: Event) -> None:
        """Copy a complete device tensor to host memory; return when the copy is done."""
        self.calls.download(value.data_ptr(), data.ctypes.data, data.size, event)
        self.calls.wait(event)

    def bytes_of(self, value: Tensor) -> Bytes:
        """Return a device tensor's content as uint8 on one axis in page-locked host memory, when the copy is done.

        The memory is used again when the array is garbage-collected.
        """
        size_bytes = size_of(value)
        if not size_bytes:
            return np.empty(0, np.uint8)
        try:
            data, event = self._on_host[size_bytes].pop()
        except IndexError:
            data, event = self.calls.host_memory(size_bytes), self.calls.event()
        self.download(value, data, event)
        return memory_at(data.ctypes.data, size_bytes, self._on_host[size_bytes].append, (data, event))

    def memory(self, tensor: TensorSpec) -> tuple[int, Uploaded]:
        """Allocate device memory that a link receives a tensor into; return its address and the value to deliver."""
        try:
            memory = self._make_tensor(tensor)
        except Exception as error:
            raise WorkerError(f"the GPU has no memory for tensor {tensor.name!r}: {first_line(error)}") from error
        return self.address(memory), Uploaded(memory, self.calls.event())

    def address(self, value: Tensor) -> int:
        return int(value.data_ptr())

    def begin(self, inputs: Sequence[Tensor | Uploaded]) -> list[Tensor]:
        """Return a stage's inputs on the device; kernels launched from now on wait for their uploads."""
        for value in inputs:
            if isinstance(value, Uploaded):
                self.calls.compute_after(value.event)
        return [value.tensor if isinstance(value, Uploaded) else value for value in inputs]

    def end(self) -> None:
        """Wait until all launched kernels are done. Only the computing thread calls this."""
        self.calls.computed(self._end)
        self.calls.wait(self._end)


@dataclass(frozen=True, slots=True)
class _Slot(TensorSlot):
    transfers: DeviceTransfers
    event: Event

    def copy_in(self, value: Tensor) -> None:
        self.transfers.download(value, self.data, self.event)


class UploadingOwner:
    """A `LinkOwner` that uploads each received tensor to the GPU, and delivers it to the wrapped owner.

    A tensor that a link has received into device memory needs no upload.
    """

    def __init__(self, owner: LinkOwner, transfers: DeviceTransfers) -> None:
        self._owner, self._transfers = owner, transfers
        self.lock, self.device = owner.lock, transfers
        self.moved, self.transferred, self.widened = owner.moved, owner.transferred, owner.widened
        self.room_locked, self.wake, self.starves_locked = owner.room_locked, owner.wake, owner.starves_locked

    def deliver(self, route: Route, sequence: int, value: Tensor | Uploaded, release: Callable[[], None]) -> None:
        if isinstance(value, Uploaded):
            self._owner.deliver(route, sequence, value, release)
            return
        uploaded = self._transfers.upload(route.tensor, value)
        if uploaded is None:
            return

        def release_both() -> None:
            self._transfers.give_back(route.tensor, uploaded)
            release()

        self._owner.deliver(route, sequence, uploaded, release_both)


@cache
def nvidia_library(name: str, file: str) -> ctypes.CDLL:
    """Return a library of the system or of pip's package ``nvidia-NAME``; raise `WorkerError` if it is not found."""
    for path in (file, *(str(folder / "lib" / file) for folder in installed_folders(name))):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise WorkerError(f"NVIDIA's library {file} is not found: pip install nvidia-{name}-cu13")


def overlapping_transfers(stages: Sequence[StageSpec]) -> DeviceTransfers | None:
    """Return the transfers of a machine whose stages all run on a GPU; None for other machines.

    Raises:
        WorkerError: this machine has no CUDA device, or the device fails.
    """
    if not stages or any(stage.device != "cuda" for stage in stages):
        return None
    device = find_device("cuda", f"stage {stages[0].name!r} on machine {stages[0].machine!r}")
    library = runtime_library()
    if library is None:
        return None  # unreachable: `find_device` raises first
    return DeviceTransfers(CudaCalls(library), lambda tensor: tvm.runtime.empty(tensor.shape, tensor.dtype, device))
