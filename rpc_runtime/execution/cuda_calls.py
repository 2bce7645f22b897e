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
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.runner import Bytes

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
"""``cudaMemcpyKind``."""
NON_BLOCKING = 0x01
"""``cudaStreamNonBlocking``."""
SLEEPING_WAIT, NO_TIMES = 0x01, 0x02
"""``cudaEventBlockingSync``: who waits leaves the core to others, as CPU stages on the same host need it;
``cudaEventDisableTiming``."""
NOT_READY = 600
"""``cudaErrorNotReady``."""
NULL_STREAM, DEVICE = None, 0
LONGEST_BUS_IDENTITY = 32

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


class CudaCalls:
    """The device's calls; what is made here lives until nobody has it. Thread-safe, as CUDA's runtime is.

    Raises:
        WorkerError: a call fails: names it, with CUDA's words.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {name: library[name] for name in _FUNCTIONS}
        for name, function in self._functions.items():
            function.argtypes, function.restype = _FUNCTIONS[name], ctypes.c_int
        self._words = library["cudaGetErrorString"]
        self._words.argtypes, self._words.restype = (ctypes.c_int,), ctypes.c_char_p
        self._uploads, self._downloads = self.stream(), self.stream()

    def host_memory(self, size_bytes: int) -> Bytes:
        """Page-locked: the device reads and writes it while this process does something else."""
        address = self._made("cudaMallocHost", max(size_bytes, 1))
        return memory_at(address, max(size_bytes, 1), self._functions["cudaFreeHost"], address)[:size_bytes]

    def mark(self) -> Mark:
        """A new one, which is reached already."""
        return self._owned(Mark, "cudaEventCreateWithFlags", "cudaEventDestroy", SLEEPING_WAIT | NO_TIMES)

    def upload(self, source: int, target: int, size_bytes: int, mark: Mark) -> None:
        """Begin to copy from the host's address to the device's; ``mark`` is reached when that is done."""
        self._copy(source, target, size_bytes, HOST_TO_DEVICE, self._uploads, mark)

    def download(self, source: int, target: int, size_bytes: int, mark: Mark) -> None:
        """Begin to copy from the device's address to the host's; ``mark`` is reached when that is done."""
        self._copy(source, target, size_bytes, DEVICE_TO_HOST, self._downloads, mark)

    def compute_after(self, mark: Mark) -> None:
        """What is computed from now on begins when ``mark`` is reached, as it was recorded last."""
        self._call("cudaStreamWaitEvent", NULL_STREAM, mark.address, 0)

    def computed(self, mark: Mark) -> None:
        """``mark`` is reached when all is done that was to be computed until now."""
        self._call("cudaEventRecord", mark.address, NULL_STREAM)

    def wait(self, mark: Mark) -> None:
        """Until it is reached. Other threads of this process go on."""
        self._call("cudaEventSynchronize", mark.address)

    def stream(self) -> Stream:
        """A new one, beside all others; the device ends what is under way on it before it goes."""
        return self._owned(Stream, "cudaStreamCreateWithFlags", "cudaStreamDestroy", NON_BLOCKING)

    def record(self, mark: Mark, stream: Stream) -> None:
        """``mark`` is reached when all is done that ``stream`` was to do until now."""
        self._call("cudaEventRecord", mark.address, stream.address)

    def is_reached(self, mark: Mark) -> bool:
        code = self._functions["cudaEventQuery"](mark.address)
        if code != NOT_READY:
            self._require(code, "cudaEventQuery")
        return not code

    def bus_identity(self) -> str:
        """Where the device is on its host's bus, such as ``0000:3b:00.0``."""
        text = ctypes.create_string_buffer(LONGEST_BUS_IDENTITY)
        self._call("cudaDeviceGetPCIBusId", text, LONGEST_BUS_IDENTITY, DEVICE)
        return text.value.decode(errors="replace")

    def _copy(self, source: int, target: int, size_bytes: int, kind: int, stream: Stream, mark: Mark) -> None:
        if size_bytes:
            self._call("cudaMemcpyAsync", target, source, size_bytes, kind, stream.address)
        self.record(mark, stream)

    def _call(self, function: str, *arguments: Any) -> None:
        self._require(self._functions[function](*arguments), function)

    def _require(self, code: int, function: str) -> None:
        if code:
            words = (self._words(code) or b"").decode(errors="replace")
            raise WorkerError(f"the GPU fails: {function}: {words or f'error {code}'}")

    def _made(self, function: str, *arguments: Any) -> int:
        """What a function makes: its address is the function's first argument."""
        found = ctypes.c_void_p()
        self._call(function, ctypes.byref(found), *arguments)
        return found.value or 0

    def _owned(self, kind: type[AnyHandle], made_by: str, dropped_by: str, *arguments: Any) -> AnyHandle:
        """As `_made`; ``dropped_by`` is called with it when nobody has it any more, and its failure is nobody's."""
        handle = kind(self._made(made_by, *arguments))
        weakref.finalize(handle, self._functions[dropped_by], handle.address).atexit = False  # as in `memory_at`
        return handle
