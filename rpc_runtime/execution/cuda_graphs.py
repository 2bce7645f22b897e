"""What a GPU is asked for to record kernels, and to launch them together: CUDA graphs.

Functions of CUDA's runtime (CUDA Runtime API 13.0: Stream, Graph and Memory Management), as in `cuda_calls`.

- What is recorded is what one thread puts on one stream. It is recorded with ``cudaStreamCaptureModeThreadLocal``: this
  thread may neither allocate nor free memory of the device meanwhile, nor lock pages of the host's (a call that does
  fails, and so does the recording), while "concurrent capture sequences in other threads are ignored" for all others.
- The stream is one with ``cudaStreamNonBlocking``: a recording on any other stream would forbid every thread the NULL
  stream, on which TVM launches.

No GPU was at hand: nothing of this has run on one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tvm_split.rpc_runtime.errors import WorkerError
from tvm_split.rpc_runtime.execution.cuda_calls import DEVICE_TO_DEVICE, NULL_STREAM, CudaFunctions, Handle, Stream

THREAD_LOCAL = 1
"""``cudaStreamCaptureModeThreadLocal``."""

_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cudaStreamCreateWithFlags": (_out, ctypes.c_uint),
    "cudaStreamDestroy": (_pointer,),
    "cudaStreamSynchronize": (_pointer,),
    "cudaStreamBeginCapture": (_pointer, ctypes.c_int),
    "cudaStreamEndCapture": (_pointer, _out),
    "cudaGraphInstantiate": (_out, _pointer, ctypes.c_ulonglong),
    "cudaGraphDestroy": (_pointer,),
    "cudaGraphExecDestroy": (_pointer,),
    "cudaGraphLaunch": (_pointer, _pointer),
    "cudaMemcpyAsync": (_pointer, _pointer, ctypes.c_size_t, ctypes.c_int, _pointer),
    "cudaMemsetAsync": (_pointer, ctypes.c_int, ctypes.c_size_t, _pointer),
    "cudaGetLastError": (),
}


class Graph(Handle):
    """Recorded work that can be launched."""

    __slots__ = ()


class GraphCalls:
    """Recording and launching; what is made here lives until nobody has it. Thread-safe, as CUDA's runtime is.

    Raises:
        WorkerError: a call fails: names it, with CUDA's words.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._cuda = CudaFunctions(library, _FUNCTIONS)

    def stream(self) -> Stream:
        """One to record on."""
        return self._cuda.stream()

    def record(self, stream: Stream, put: Callable[[], object]) -> Graph:
        """What ``put`` puts on the stream in this thread, none of which is done. It has ended in any case."""
        self._cuda.call("cudaStreamBeginCapture", stream.address, THREAD_LOCAL)
        try:
            put()
        except BaseException:
            # The recording's own end fails then, and its error would be the next call's.
            recorded = ctypes.c_void_p()
            if not self._cuda["cudaStreamEndCapture"](stream.address, ctypes.byref(recorded)) and recorded:
                self._cuda["cudaGraphDestroy"](recorded)
            self._cuda["cudaGetLastError"]()
            raise
        recorded = ctypes.c_void_p()
        try:
            self._cuda.call("cudaStreamEndCapture", stream.address, ctypes.byref(recorded))
        except WorkerError:
            self._cuda["cudaGetLastError"]()
            raise
        try:
            return self._cuda.owned(Graph, "cudaGraphInstantiate", "cudaGraphExecDestroy", recorded, 0)
        finally:
            self._cuda["cudaGraphDestroy"](recorded)

    def launch(self, graph: Graph, stream: Stream | None = None) -> None:
        """Begins it when all is done that was put on the stream before: without one, on that of TVM's kernels."""
        self._cuda.call("cudaGraphLaunch", graph.address, _address(stream))

    def copy(self, source: int, target: int, size_bytes: int) -> None:
        """From the device's address to another, on the stream that TVM's kernels take."""
        if size_bytes:
            self._cuda.call("cudaMemcpyAsync", target, source, size_bytes, DEVICE_TO_DEVICE, NULL_STREAM)

    def fill(self, address: int, value: int, size_bytes: int, stream: Stream) -> None:
        """Each byte of the device's memory from an address on."""
        if size_bytes:
            self._cuda.call("cudaMemsetAsync", address, value, size_bytes, stream.address)

    def wait(self, stream: Stream | None = None) -> None:
        """Until all is done that was put on it."""
        self._cuda.call("cudaStreamSynchronize", _address(stream))


def _address(stream: Stream | None) -> int | None:
    return NULL_STREAM if stream is None else stream.address
