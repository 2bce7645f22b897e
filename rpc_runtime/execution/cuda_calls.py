"""CUDA calls that TVM's runtime does not offer: page-locked host memory, streams for copies, and events.

In Python, TVM 0.27 copies tensors only on the computing stream, so that copies and kernels wait for each other. These
are functions of the CUDA runtime (CUDA Runtime API 13.0: Device, Stream, Event and Memory Management). They are called
in the library that TVM's is linked with, on device 0, which is current in every thread.

TVM launches kernels on the stream that a thread has set (``TVMFFIEnvGetStream``). None is set here, so it is the NULL
stream. Streams made with ``cudaStreamNonBlocking`` are ordered with the NULL stream only by events.
"""

import ctypes
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.specs import Bytes

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
"""``cudaMemcpyKind``."""
NON_BLOCKING = 0x01
"""``cudaStreamNonBlocking``."""
SLEEPING_WAIT, NO_TIMES = 0x01, 0x02
"""``cudaEventBlockingSync``: a waiting thread sleeps and leaves its core to CPU stages of the same host;
``cudaEventDisableTiming``."""
NOT_READY = 600
"""``cudaErrorNotReady``."""
NULL_STREAM, DEVICE = None, 0
LONGEST_BUS_IDENTITY = 32
SMALL_BYTES, LARGE_BYTES = 4096, 32 << 20
ROUNDS = 5
"""Sizes of the copies that measure the bus, and how often each is made."""

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
    """Return host memory as a byte array; ``dropped(argument)`` is called when no array or view of it is left."""
    block = (ctypes.c_uint8 * size_bytes).from_address(address)
    # Not at exit: CUDA may be unloaded by then, and the driver frees all memory.
    weakref.finalize(block, dropped, argument).atexit = False
    array: Bytes = np.frombuffer(memoryview(block), np.uint8)
    return array


class Handle:
    """A CUDA object by its address; it is destroyed when this handle is garbage-collected."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int) -> None:
        self.address = address


Event = Handle
"""A CUDA event: a point in the work of a stream. It is recorded again for each use."""
Stream = Handle
"""A CUDA stream: its operations run one after another."""


class CudaCalls:
    """CUDA calls for device 0. Returned objects live as long as they are referenced. Thread-safe, like CUDA's runtime.

    Raises:
        WorkerError: a call fails; the message has its name and CUDA's error text.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {name: library[name] for name in _FUNCTIONS}
        for name, function in self._functions.items():
            function.argtypes, function.restype = _FUNCTIONS[name], ctypes.c_int
        self._words = library["cudaGetErrorString"]
        self._words.argtypes, self._words.restype = (ctypes.c_int,), ctypes.c_char_p
        self._uploads, self._downloads = self.stream(), self.stream()

    def host_memory(self, size_bytes: int) -> Bytes:
        """Return page-locked memory, which the device copies asynchronously to and from."""
        address = self._made("cudaMallocHost", max(size_bytes, 1))
        return memory_at(address, max(size_bytes, 1), self._functions["cudaFreeHost"], address)[:size_bytes]

    def event(self) -> Event:
        """Return a new event, which counts as completed until it is recorded."""
        return self._owned("cudaEventCreateWithFlags", "cudaEventDestroy", SLEEPING_WAIT | NO_TIMES)

    def upload(self, source: int, target: int, size_bytes: int, event: Event) -> None:
        """Begin to copy from host address ``source`` to device address ``target``; record ``event`` behind the copy."""
        self._copy(source, target, size_bytes, HOST_TO_DEVICE, self._uploads, event)

    def download(self, source: int, target: int, size_bytes: int, event: Event) -> None:
        """Begin to copy from device address ``source`` to host address ``target``; record ``event`` behind the copy."""
        self._copy(source, target, size_bytes, DEVICE_TO_HOST, self._downloads, event)

    def compute_after(self, event: Event) -> None:
        """Make kernels launched from now on wait until ``event``, as recorded last, has completed."""
        self._call("cudaStreamWaitEvent", NULL_STREAM, event.address, 0)

    def computed(self, event: Event) -> None:
        """Record ``event`` behind all kernels launched so far."""
        self._call("cudaEventRecord", event.address, NULL_STREAM)

    def wait(self, event: Event) -> None:
        """Wait until ``event`` has completed. Releases the GIL."""
        self._call("cudaEventSynchronize", event.address)

    def stream(self) -> Stream:
        """Return a new stream, independent of the others; operations in flight end before the stream is destroyed."""
        return self._owned("cudaStreamCreateWithFlags", "cudaStreamDestroy", NON_BLOCKING)

    def record(self, event: Event, stream: Stream) -> None:
        """Record ``event`` behind all operations given to ``stream`` so far."""
        self._call("cudaEventRecord", event.address, stream.address)

    def has_completed(self, event: Event) -> bool:
        code = self._functions["cudaEventQuery"](event.address)
        if code != NOT_READY:
            self._require(code, "cudaEventQuery")
        return not code

    def bus_identity(self) -> str:
        """Return the device's PCI bus id, such as ``0000:3b:00.0``."""
        text = ctypes.create_string_buffer(LONGEST_BUS_IDENTITY)
        self._call("cudaDeviceGetPCIBusId", text, LONGEST_BUS_IDENTITY, DEVICE)
        return text.value.decode(errors="replace")

    def _copy(self, source: int, target: int, size_bytes: int, kind: int, stream: Stream, event: Event) -> None:
        if size_bytes:
            self._call("cudaMemcpyAsync", target, source, size_bytes, kind, stream.address)
        self.record(event, stream)

    def _call(self, function: str, *arguments: Any) -> None:
        self._require(self._functions[function](*arguments), function)

    def _require(self, code: int, function: str) -> None:
        if code:
            words = (self._words(code) or b"").decode(errors="replace")
            raise WorkerError(f"the GPU fails: {function}: {words or f'error {code}'}")

    def _made(self, function: str, *arguments: Any) -> int:
        """Call a function that writes the address of a new object to its first argument; return that address."""
        address = ctypes.c_void_p()
        self._call(function, ctypes.byref(address), *arguments)
        return address.value or 0

    def _owned(self, made_by: str, dropped_by: str, *arguments: Any) -> Handle:
        """Return the handle of a new object; its garbage collection calls ``dropped_by`` and ignores errors."""
        handle = Handle(self._made(made_by, *arguments))
        weakref.finalize(handle, self._functions[dropped_by], handle.address).atexit = False  # as in `memory_at`
        return handle


def bus_speed(calls: CudaCalls, address: Callable[[int], tuple[Any, int]]) -> tuple[float, float]:
    """Return bandwidth (bytes/s) and latency (s) of copies between page-locked host memory and device memory.

    Copies are made one at a time; the best of `ROUNDS` counts, in the slower direction.

    Args:
        address: allocates device memory of a size in bytes; returns an object that keeps it alive, and its address.
    """
    event = calls.event()
    host = calls.host_memory(LARGE_BYTES)
    memory, device = address(LARGE_BYTES)

    def best(size_bytes: int) -> float:
        slower = 0.0
        for copy, ends in ((calls.upload, (host.ctypes.data, device)), (calls.download, (device, host.ctypes.data))):
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                copy(*ends, size_bytes, event)
                calls.wait(event)
                times.append(time.perf_counter() - start)
            slower = max(slower, min(times))
        return slower

    best(SMALL_BYTES)  # warm-up
    latency, whole = best(SMALL_BYTES), best(LARGE_BYTES)
    del memory
    return (LARGE_BYTES - SMALL_BYTES) / max(whole - latency, 1e-9), latency
