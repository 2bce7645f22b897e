"""Memory of a GPU that another GPU brings tensors to: one that writes into it, in a process of this host, or by NCCL.

Such a slot needs no upload and no other copy: what is in it was written before it is handed on. Which memory is closed
and freed when, between the two, is in `transports.device_memory` and `transports.nccl`; what is asked of the device is
in `cuda_calls` and `nccl_calls`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm_split.rpc_runtime.closing import do_all
from tvm_split.rpc_runtime.errors import ProtocolError, WorkerError
from tvm_split.rpc_runtime.execution.device_transfers import DeviceCalls, Mark, Tensor, Uploaded
from tvm_split.rpc_runtime.execution.nccl_calls import NcclCommunicator, NcclLibrary, nccl_library
from tvm_split.rpc_runtime.execution.stage_executable import first_line
from tvm_split.rpc_runtime.hardware import boot_id
from tvm_split.rpc_runtime.program.link_setting import IPC_BLOCK_BYTES
from tvm_split.rpc_runtime.program.program import TensorSpec
from tvm_split.rpc_runtime.transports.slots import NOT_OF_THE_HOST, Slot


class _Opened:
    """Memory of another process at these addresses, which is closed when nobody has this."""

    __slots__ = ("__weakref__", "calls")

    def __init__(self, calls: DeviceCalls, addresses: Sequence[int], shut: Callable[[], object]) -> None:
        self.calls = calls
        weakref.finalize(self, _shut, calls, addresses, shut).atexit = False  # the process's end closes it


def _shut(calls: DeviceCalls, addresses: Sequence[int], shut: Callable[[], object]) -> None:
    """The other end frees it only after ``shut``."""
    do_all([*(partial(calls.shut, address) for address in addresses), shut])


@dataclass(frozen=True, slots=True)
class _OthersSlot(Slot):
    """``value`` is its address."""

    memory: _Opened
    size_bytes: int
    mark: Mark

    def fill(self, value: Tensor) -> None:
        """Returns when it is there: nothing is copied any more when the memory is closed."""
        self.memory.calls.hand_over(value.data_ptr(), self.value, self.size_bytes, self.mark)
        self.memory.calls.wait(self.mark)


class CudaExchange:
    """A `DeviceExchange` of this process's GPU, of which ``make_tensor`` makes memory. Thread-safe."""

    def __init__(self, calls: DeviceCalls, make_tensor: Callable[[TensorSpec], Tensor]) -> None:
        self._calls, self._make_tensor = calls, make_tensor

    def own_slot(self, tensor: TensorSpec) -> tuple[bytes, Slot]:
        size_bytes = max(-(-tensor.size_bytes // IPC_BLOCK_BYTES), 1) * IPC_BLOCK_BYTES
        memory = _made(self._make_tensor, TensorSpec(tensor.name, (size_bytes,), "uint8"))
        view = memory._create_view(tensor.shape, tensor.dtype)
        return self._calls.exported(memory.data_ptr()), Slot(NOT_OF_THE_HOST, Uploaded(view, None))

    def nccl(self) -> CudaNccl:
        return CudaNccl(nccl_library(), self._calls, self._make_tensor)

    def open_slots(self, opened: Sequence[tuple[TensorSpec, bytes]], shut: Callable[[], object]) -> list[Slot]:
        addresses: list[int] = []
        try:
            for tensor, handle in opened:
                addresses.append(self._calls.opened(handle))
                found = self._calls.bytes_behind(addresses[-1])
                if found < tensor.size_bytes:
                    raise ProtocolError(
                        f"the GPU's memory for tensor {tensor.name!r} should have {tensor.size_bytes} bytes, it has "
                        f"{found}"
                    )
            marks = [self._calls.mark() for _ in opened]
        except BaseException:
            _shut(self._calls, addresses, shut)
            raise
        memory = _Opened(self._calls, addresses, shut)
        return [
            _OthersSlot(NOT_OF_THE_HOST, address, memory, tensor.size_bytes, mark)
            for (tensor, _), address, mark in zip(opened, addresses, marks, strict=True)
        ]


class CudaNccl:
    """A `transports.nccl.Nccl` of this process's GPU."""

    def __init__(self, library: NcclLibrary, calls: DeviceCalls, make_tensor: Callable[[TensorSpec], Tensor]) -> None:
        self._library, self._calls, self._make_tensor = library, calls, make_tensor
        self.version, self.turn, self.unique_id = library.version, library.turn, library.unique_id
        self.gpu = f"{boot_id()} {calls.bus_identity()}"

    def communicator(self, unique_id: bytes, rank: int) -> NcclCommunicator:
        return NcclCommunicator(self._library, self._calls, unique_id, rank)

    def memory(self, tensor: TensorSpec) -> tuple[int, Uploaded]:
        memory = _made(self._make_tensor, tensor)
        return self.address(memory), Uploaded(memory, None)

    def address(self, value: Tensor) -> int:
        return int(value.data_ptr())


def _made(make_tensor: Callable[[TensorSpec], Tensor], tensor: TensorSpec) -> Tensor:
    try:
        return make_tensor(tensor)
    except Exception as error:
        raise WorkerError(f"the GPU has no memory for tensor {tensor.name!r}: {first_line(error)}") from error
