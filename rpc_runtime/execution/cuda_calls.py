"""What a GPU is asked for beyond TVM's runtime: host memory that it copies from by itself, streams for copies, events.

TVM 0.27 copies tensors from Python on no stream but the one that computes, so that a copy waits for what is computed,
and what is computed for the copy. These are functions of CUDA's own runtime (CUDA Runtime API 13.0: Device, Stream,
Event and Memory Management), called in the library that TVM's is linked with, on device 0, which is current in every
thread.

TVM launches kernels on the stream that a thread has set (``TVMFFIEnvGetStream``), and none is set here: on the NULL
stream. Streams made with ``cudaStreamNonBlocking`` are not ordered with that one, but by events alone.

No GPU was at hand: nothing of this has run on one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tvm_split.rpc_runtime.errors import WorkerError
from tvm_split.rpc_runtime.program.interface import Bytes
from tvm_split.rpc_runtime.transports.device_memory import HANDLE_BYTES

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
"""``cudaMemcpyKind``."""
NON_BLOCKING = 0x01
"""``cudaStreamNonBlocking``."""
SLEEPING_WAIT, NO_TIMES = 0x01, 0x02
"""``cudaEventBlockingSync``: who waits leaves the core to others, as CPU stages on the same host need it;
``cudaEventDisableTiming``."""
ENABLE_PEER_ACCESS = 0x01
"""``cudaIpcMemLazyEnablePeerAccess``."""
NOT_READY = 600
"""``cudaErrorNotReady``."""
NULL_STREAM, DEVICE = None, 0
LONGEST_BUS_IDENTITY = 32
ADDRESS_RANGE = "cuMemGetAddressRange_v2"
"""Of CUDA's driver; its runtime does not say how large memory is."""


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cudaMallocHost": (_out, ctypes.c_size_t),
    "cudaFreeHost": (_pointer,),
    "cudaStreamCreateWithFlags": (_out, ctypes.c_uint),
    "cudaStreamDestroy": (_pointer,),
    "cudaEventCreateWithFlags": (_out, ctypes.c_uint),
    "cudaEventDestroy": (_pointer,),
    "cudaEventRecord": (_pointer, _pointer),
    "cudaEventSynchronize": (_pointer,),
    "cudaEventQuery": (_pointer,),
    "cudaStreamWaitEvent": (_pointer, _pointer, ctypes.c_uint),
    "cudaMemcpyAsync": (_pointer, _pointer, ctypes.c_size_t, ctypes.c_int, _pointer),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), _pointer),
    "cudaIpcOpenMemHandle": (_out, _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_pointer,),
    "cudaDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
}


def memory_at(address: int, size_bytes: int, dropped: Callable[[Any], object], argument: Any) -> Bytes:
    """Memory of the host as bytes; ``dropped(argument)`` is called when nobody has this array or a part of it."""
    block = (ctypes.c_uint8 * size_bytes).from_address(address)
    # Not at the end of the process, when CUDA may be gone before, and frees all by itself.
    weakref.finalize(block, dropped, argument).atexit = False
    array: Bytes = np.frombuffer(memoryview(block), np.uint8)
    return array


class Handle:
    """Something of CUDA's, by its address, which is there as long as somebody has this."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int) -> None:
        self.address = address


class Mark(Handle):
    """A point in what a stream does: an event, which is recorded again each time that it is used."""

    __slots__ = ()


class Stream(Handle):
    """What is done one after the other."""

    __slots__ = ()


AnyHandle = TypeVar("AnyHandle", bound=Handle)


class CudaFunctions:
    """Functions of CUDA's runtime, which return numbers of errors, by name and arguments. Thread-safe, as it is.

    Raises:
        WorkerError: a call fails: names it, with CUDA's words.
    """

    def __init__(self, library: ctypes.CDLL, functions: Mapping[str, Sequence[Any]]) -> None:
        self._functions = {name: library[name] for name in functions}
        for name, function in self._functions.items():
            function.argtypes, function.restype = tuple(functions[name]), ctypes.c_int
        self._words = library["cudaGetErrorString"]
        self._words.argtypes, self._words.restype = (ctypes.c_int,), ctypes.c_char_p

    def __getitem__(self, function: str) -> Callable[..., int]:
        return self._functions[function]

    def call(self, function: str, *arguments: Any) -> None:
        self.require(self._functions[function](*arguments), function)

    def require(self, code: int, function: str) -> None:
        if code:
            words = (self._words(code) or b"").decode(errors="replace")
            raise WorkerError(f"the GPU fails: {function}: {words or f'error {code}'}")

    def made(self, function: str, *arguments: Any) -> int:
        """What a function makes: its address is the function's first argument."""
        found = ctypes.c_void_p()
        self.call(function, ctypes.byref(found), *arguments)
        return found.value or 0

    def owned(self, kind: type[AnyHandle], made_by: str, dropped_by: str, *arguments: Any) -> AnyHandle:
        """As `made`; ``dropped_by`` is called with it when nobody has it any more, and its failure is nobody's."""
        handle = kind(self.made(made_by, *arguments))
        weakref.finalize(handle, self._functions[dropped_by], handle.address).atexit = False  # as in `memory_at`
        return handle

    def stream(self) -> Stream:
        """Not ordered with the NULL stream; the device ends what is under way on it before it goes."""
        return self.owned(Stream, "cudaStreamCreateWithFlags", "cudaStreamDestroy", NON_BLOCKING)


class CudaCalls:
    """The device's calls; what is made here lives until nobody has it. Thread-safe, as CUDA's runtime is.

    ``driver`` is CUDA's driver; without it no memory of other processes is opened.

    Raises:
        WorkerError: a call fails: names it, with CUDA's words.
    """

    def __init__(self, library: ctypes.CDLL, driver: ctypes.CDLL | None = None) -> None:
        self._driver, self._cuda = driver, CudaFunctions(library, _FUNCTIONS)
        self._uploads, self._downloads = self._cuda.stream(), self._cuda.stream()

    def host_memory(self, size_bytes: int) -> Bytes:
        """Page-locked: the device reads and writes it while this process does something else."""
        address = self._cuda.made("cudaMallocHost", max(size_bytes, 1))
        return memory_at(address, max(size_bytes, 1), self._cuda["cudaFreeHost"], address)[:size_bytes]

    def mark(self) -> Mark:
        """A new one, which is reached already."""
        return self._cuda.owned(Mark, "cudaEventCreateWithFlags", "cudaEventDestroy", SLEEPING_WAIT | NO_TIMES)

    def upload(self, source: int, target: int, size_bytes: int, mark: Mark) -> None:
        """Begin to copy from the host's address to the device's; ``mark`` is reached when that is done."""
        self._copy(source, target, size_bytes, HOST_TO_DEVICE, self._uploads, mark)

    def download(self, source: int, target: int, size_bytes: int, mark: Mark) -> None:
        """Begin to copy from the device's address to the host's; ``mark`` is reached when that is done."""
        self._copy(source, target, size_bytes, DEVICE_TO_HOST, self._downloads, mark)

    def compute_after(self, mark: Mark) -> None:
        """What is computed from now on begins when ``mark`` is reached, as it was recorded last."""
        self._cuda.call("cudaStreamWaitEvent", NULL_STREAM, mark.address, 0)

    def computed(self, mark: Mark) -> None:
        """``mark`` is reached when all is done that was to be computed until now."""
        self._cuda.call("cudaEventRecord", mark.address, NULL_STREAM)

    def wait(self, mark: Mark) -> None:
        """Until it is reached. Other threads of this process go on."""
        self._cuda.call("cudaEventSynchronize", mark.address)

    def stream(self) -> Stream:
        """A new one, beside all others."""
        return self._cuda.stream()

    def record(self, mark: Mark, stream: Stream) -> None:
        """``mark`` is reached when all is done that ``stream`` was to do until now."""
        self._cuda.call("cudaEventRecord", mark.address, stream.address)

    def is_reached(self, mark: Mark) -> bool:
        code = self._cuda["cudaEventQuery"](mark.address)
        if code != NOT_READY:
            self._cuda.require(code, "cudaEventQuery")
        return not code

    def hand_over(self, source: int, target: int, size_bytes: int, mark: Mark) -> None:
        """Begin to copy from the device's address to one of a device, its own or opened; as `download`."""
        self._copy(source, target, size_bytes, DEVICE_TO_DEVICE, self._downloads, mark)

    def exported(self, address: int) -> bytes:
        """What another process of this host opens memory of the device by, which begins at ``address``."""
        handle = _Handle()
        self._cuda.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def opened(self, handle: bytes) -> int:
        """The address of another process's memory, which is there until `shut`."""
        return self._cuda.made("cudaIpcOpenMemHandle", _Handle.from_buffer_copy(handle), ENABLE_PEER_ACCESS)

    def shut(self, address: int) -> None:
        """Give up what was `opened`."""
        self._cuda.call("cudaIpcCloseMemHandle", address)

    def bytes_behind(self, address: int) -> int:
        """How much memory there is from an address of a device on."""
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        if self._driver is None:
            raise WorkerError("there is no NVIDIA driver to ask how large memory is")
        code = self._driver[ADDRESS_RANGE](ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
        if code:
            raise WorkerError(f"the GPU fails: {ADDRESS_RANGE}: error {code}")
        return begin.value + size.value - address

    def bus_identity(self) -> str:
        """Where the device is on its host's bus, such as ``0000:3b:00.0``."""
        text = ctypes.create_string_buffer(LONGEST_BUS_IDENTITY)
        self._cuda.call("cudaDeviceGetPCIBusId", text, LONGEST_BUS_IDENTITY, DEVICE)
        return text.value.decode(errors="replace")

    def _copy(self, source: int, target: int, size_bytes: int, kind: int, stream: Stream, mark: Mark) -> None:
        if size_bytes:
            self._cuda.call("cudaMemcpyAsync", target, source, size_bytes, kind, stream.address)
        self.record(mark, stream)
