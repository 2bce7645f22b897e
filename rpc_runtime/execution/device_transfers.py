"""Transfers of a GPU's machine that overlap with what it computes, and with each other: three micro-batches at once.

    receive 3   a link's thread writes it into page-locked memory, and begins its upload ──▶ mark
    compute 2   the computing thread: begins after the marks of its inputs, and waits until it is done
    send 1      a link's thread downloads it into page-locked memory, waits for that, and sends it

Nothing waits for the whole device: each waits for what it needs. Why memory is not used twice at once:

- What was received stays in its place, and its copy on the device too, until the stages that take it have ended, which
  is after their upload: the credit, and the room on the device, are given back together. Where a program ends before,
  its uploads are waited for.
- What a stage has made is complete before it is handed on. Who sends it holds it until it was downloaded.
- A stage whose output is a view of an input gets a copy of it (`LoadedStage`), since the input's memory is reused.

Here are the order and the memory alone; what is asked of a device is in `cuda_calls`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm

from rpc_runtime.execution.cuda_calls import CudaCalls, Mark, memory_at
from rpc_runtime.execution.cuda_runtime import runtime_library
from rpc_runtime.execution.executor import RunnableStage
from rpc_runtime.execution.loaded_stage import (
    TensorSlot,
    find_device,
    size_of,
    tensor_slot,
)
from rpc_runtime.processes import do_all
from rpc_runtime.program.program import StageSpec, TensorSpec
from rpc_runtime.program.routes import Route
from rpc_runtime.program.runner import Bytes
from rpc_runtime.transports.link_end import Station
from rpc_runtime.transports.slots import Slot

Tensor = Any


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A tensor on the device, whose content is there when ``mark`` is reached."""

    tensor: Tensor
    mark: Mark


@dataclass(frozen=True, slots=True)
class _HostBuffer:
    data: Bytes
    mark: Mark


class DeviceTransfers:
    """The memory that a device's transfers go through, reused. ``make_tensor`` makes memory of the device. Thread-safe.

    Life: made, used, ``close``, which waits for uploads that nobody waited for: their memory may go only then.
    """

    def __init__(self, calls: CudaCalls, make_tensor: Callable[[TensorSpec], Tensor]) -> None:
        self.calls, self.make_tensor = calls, make_tensor
        self._lock = threading.Lock()
        self._under_way: dict[Mark, tuple[Uploaded, Tensor]] = {}
        """With the source, by the mark, until it is given back."""
        self._closed = False
        self._on_device: defaultdict[str, list[Uploaded]] = defaultdict(list)
        self._on_host: defaultdict[int, list[_HostBuffer]] = defaultdict(list)
        self._end = calls.mark()

    def slot(self, tensor: TensorSpec, memory: Bytes | None = None) -> Slot:
        """Memory of the host for one tensor, page-locked unless it is given; filled with tensors of the device."""
        seen = tensor_slot(tensor, self.calls.host_memory(tensor.size_bytes) if memory is None else memory)
        return _Slot(seen.data, seen.value, self, self.calls.mark())

    def upload(self, tensor: TensorSpec, value: Tensor) -> Uploaded | None:
        """Begin to bring a tensor of the host, which must stay as it is, to the device; None after `close`."""
        with self._lock:
            if self._closed:
                return None
            free = self._on_device[tensor.name]
            uploaded = free.pop() if free else Uploaded(self.make_tensor(tensor), self.calls.mark())
            self._under_way[uploaded.mark] = uploaded, value
            self.calls.upload(value.data_ptr(), uploaded.tensor.data_ptr(), tensor.size_bytes, uploaded.mark)
        return uploaded

    def give_back(self, tensor: TensorSpec, uploaded: Uploaded) -> None:
        """All that takes it has ended."""
        with self._lock:
            self._under_way.pop(uploaded.mark, None)
            if not self._closed:
                self._on_device[tensor.name].append(uploaded)

    def close(self) -> None:
        """Nothing is uploaded any more, nothing is being uploaded, and no memory is kept for it. May be called again.

        Raises:
            WorkerError: the device fails: of several errors the first, when all uploads were waited for. Not again.
        """
        with self._lock:
            self._closed = True
            under_way, self._under_way = self._under_way, {}
            error = do_all(partial(self.calls.wait, mark) for mark in under_way)
            self._on_device.clear()
        if error is not None:
            raise error

    def download(self, value: Tensor, data: Bytes, mark: Mark) -> None:
        """Copy a tensor of the device, which is complete; returns when that is done."""
        self.calls.download(value.data_ptr(), data.ctypes.data, data.size, mark)
        self.calls.wait(mark)

    def bytes_of(self, value: Tensor) -> Bytes:
        """The content of a tensor of the device, in page-locked memory that is reused when nobody has this array."""
        size_bytes = size_of(value)
        if not size_bytes:
            return np.empty(0, np.uint8)
        try:
            buffer = self._on_host[size_bytes].pop()
        except IndexError:
            buffer = _HostBuffer(self.calls.host_memory(size_bytes), self.calls.mark())
        self.download(value, buffer.data, buffer.mark)
        return memory_at(buffer.data.ctypes.data, size_bytes, self._on_host[size_bytes].append, buffer)

    def begin(self, inputs: Sequence[Tensor | Uploaded]) -> list[Tensor]:
        """A stage's inputs on the device; what is computed from now on begins when they are there."""
        for each in inputs:
            if isinstance(each, Uploaded):
                self.calls.compute_after(each.mark)
        return [each.tensor if isinstance(each, Uploaded) else each for each in inputs]

    def end(self) -> None:
        """Returns when all is done that was to be computed. For the computing thread."""
        self.calls.computed(self._end)
        self.calls.wait(self._end)


@dataclass(frozen=True, slots=True)
class _Slot(TensorSlot):
    transfers: DeviceTransfers
    mark: Mark

    def copy_in(self, value: Tensor) -> None:
        self.transfers.download(value, self.data, self.mark)


class OverlappedStage:
    """A stage that computes while others' inputs and outputs travel; its executable ends with `DeviceTransfers.end`."""

    def __init__(self, executable: RunnableStage, transfers: DeviceTransfers) -> None:
        self._executable, self._transfers = executable, transfers

    @property
    def stage(self) -> StageSpec:
        return self._executable.stage

    def run(self, inputs: Sequence[Tensor | Uploaded]) -> Sequence[Tensor]:
        return self._executable.run(self._transfers.begin(inputs))


class UploadingStation:
    """Stands before the station of a device's machine, for the links that end there: what comes is uploaded at once.

    What came by NCCL is on the device already.
    """

    def __init__(self, station: Station, transfers: DeviceTransfers) -> None:
        self._station, self._transfers = station, transfers
        self.lock = station.lock
        self.moved, self.transferred = station.moved, station.transferred
        self.room_locked, self.starves_locked = station.room_locked, station.starves_locked

    def deliver(self, route: Route, sequence: int, value: Tensor | Uploaded, release: Callable[[], None]) -> None:
        if isinstance(value, Uploaded):
            self._station.deliver(route, sequence, value, release)
            return
        uploaded = self._transfers.upload(route.tensor, value)
        if uploaded is None:
            return

        def release_both() -> None:
            self._transfers.give_back(route.tensor, uploaded)
            release()

        self._station.deliver(route, sequence, uploaded, release_both)


def overlapping_transfers(stages: Sequence[StageSpec]) -> DeviceTransfers | None:
    """For the stages of a machine with a GPU; None for others.

    Raises:
        WorkerError: this machine has no such device, or it fails.
    """
    if not stages or any(stage.device != "cuda" for stage in stages):
        return None
    device = find_device("cuda", f"stage {stages[0].name!r} on machine {stages[0].machine!r}")
    library = runtime_library()
    if library is None:
        return None  # it would not have found the device
    return DeviceTransfers(CudaCalls(library), lambda tensor: tvm.runtime.empty(tensor.shape, tensor.dtype, device))
