"""NCCL's library, loaded when a link needs it, and communicators of two GPUs, each with its own stream.

NCCL User Guide 2.28: Communicator Creation and Management, Point To Point Communication, Fault Tolerance. Communicators
are non-blocking: an unfinished call returns ``ncclInProgress``, and its communicator may not be used until
``ncclCommGetAsyncError`` no longer returns that. The operation is then on its stream.

This module was written without a GPU and has not run on one.
"""

import ctypes
import threading
from functools import cache
from typing import Any

from rpc_runtime.errors import WorkerError
from rpc_runtime.hardware import boot_id
from rpc_runtime.transports.link_end import Device

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
"""``NCCL_UNIQUE_ID_BYTES``."""
OLDEST = 21800
"""Oldest supported version: older ones abort communicators with a dead rank differently (NVIDIA/nccl#863)."""
SUCCESS, IN_PROGRESS = 0, 7
"""``ncclResult_t``."""
BYTES = 0
"""``ncclInt8``."""
MAGIC, LAYOUT, UNDEFINED = 0xCAFEBEEF, 21700, -(2**31)
"""Constants of ``ncclConfig_t``. The layout is given as a version; later versions treat missing fields as undefined."""


def version_text(number: int) -> str:
    """Return NCCL's version number as text: 22703 is "2.27.3"."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


class _UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of 2.17."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cluster_size", "fewest_blocks", "most_blocks")),
        ("network", ctypes.c_char_p),
    )


_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_transfer = (_pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _pointer, _pointer)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (_out, ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)),
    "ncclCommGetAsyncError": (_pointer, ctypes.POINTER(ctypes.c_int)),
    "ncclSend": _transfer,
    "ncclRecv": _transfer,
    "ncclCommAbort": (_pointer,),
}


class NcclLibrary:
    """NCCL's functions. ``transfer_lock`` is held by a transfer: `transports.nccl` says why only one may run.

    Raises:
        WorkerError: the library lacks functions or is too old.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        try:
            self._functions = {name: library[name] for name in _FUNCTIONS}
            self._words, self._last_words = library["ncclGetErrorString"], library["ncclGetLastError"]
        except AttributeError as error:
            raise WorkerError(f"{library._name} is too old, NCCL {version_text(OLDEST)} is needed: {error}") from error
        for name, function in self._functions.items():
            function.argtypes, function.restype = _FUNCTIONS[name], ctypes.c_int
        self._words.argtypes, self._words.restype = (ctypes.c_int,), ctypes.c_char_p
        self._last_words.argtypes, self._last_words.restype = (_pointer,), ctypes.c_char_p
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version, self.transfer_lock = version.value, threading.Lock()
        if self.version < OLDEST:
            raise WorkerError(
                f"{library._name} is NCCL {version_text(self.version)}, and {version_text(OLDEST)} or newer is needed"
            )

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function; return also if it is still in progress.

        Raises:
            WorkerError: the call fails; the message has its name and NCCL's error text.
        """
        self.require(self._functions[function](*arguments), function)

    def require(self, code: int, function: str) -> None:
        if code not in (SUCCESS, IN_PROGRESS):
            words = ((text or b"").decode(errors="replace") for text in (self._words(code), self._last_words(None)))
            raise WorkerError(f"NCCL fails: {function}: {'; '.join(filter(None, words)) or f'error {code}'}")

    def unique_id(self) -> bytes:
        unique_id = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)


class NcclCommunicator:
    """A communicator of two ranks; this end is ``rank`` 0 or 1. Only one thread may begin operations.

    Each method raises a `WorkerError` if NCCL has failed; `send` and `receive` require `is_ready`.
    """

    def __init__(self, nccl: NcclLibrary, cuda: Any, unique_id: bytes, rank: int) -> None:
        self._nccl, self._cuda, self._peer = nccl, cuda, 1 - rank
        self._stream, self._event, self._is_recorded = cuda.stream(), cuda.event(), True
        self._handle = ctypes.c_void_p()
        self._is_aborted = False
        config = _Config(ctypes.sizeof(_Config), MAGIC, LAYOUT, 0, *[UNDEFINED] * 3, None)
        named = _UniqueId.from_buffer_copy(unique_id)
        nccl.call("ncclCommInitRankConfig", ctypes.byref(self._handle), 2, named, rank, ctypes.byref(config))

    def is_ready(self) -> bool:
        """Return whether both ranks have joined, and the operation begun last was submitted to the device."""
        self._require_there()
        state = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        self._nccl.require(state.value, "a communicator")
        return state.value != IN_PROGRESS

    def send(self, address: int, size_bytes: int) -> None:
        self._begin("ncclSend", address, size_bytes)

    def receive(self, address: int, size_bytes: int) -> None:
        self._begin("ncclRecv", address, size_bytes)

    def is_done(self) -> bool:
        """Return whether the operation begun last has ended."""
        if not self.is_ready():
            return False
        if not self._is_recorded:
            self._cuda.record(self._event, self._stream)
            self._is_recorded = True
        return bool(self._cuda.has_completed(self._event))

    def abort(self) -> None:
        """Abort the communicator and its operations in flight. May take long."""
        self._is_aborted = True
        if self._handle:
            self._nccl.call("ncclCommAbort", self._handle)

    def _require_there(self) -> None:
        if self._is_aborted:
            raise WorkerError("the communicator of NCCL was ended")

    def _begin(self, function: str, address: int, size_bytes: int) -> None:
        self._require_there()
        self._is_recorded = False
        self._nccl.call(function, address, size_bytes, BYTES, self._peer, self._handle, self._stream.address)


class CudaNccl:
    """NCCL on a GPU. Thread-safe; the first instance loads NCCL's library.

    ``gpu`` is a globally unique name of the GPU, ``transfer_lock`` the lock of this process for one transfer at a time.
    `unique_id` returns the id by which two ranks find each other; this process then listens for them.

    Raises:
        WorkerError: the library is not found or cannot be used.
    """

    def __init__(self, device: Device) -> None:
        with _LOADING:
            self._library = _functions_of(device.library("nccl", LIBRARY))
        self.version, self.transfer_lock = self._library.version, self._library.transfer_lock
        self.unique_id, self._calls = self._library.unique_id, device.calls
        self.gpu = f"{boot_id()} {self._calls.bus_identity()}"

    def communicator(self, unique_id: bytes, rank: int) -> NcclCommunicator:
        """Return a new communicator, which is not ready yet."""
        return NcclCommunicator(self._library, self._calls, unique_id, rank)


_functions_of = cache(NcclLibrary)
# `cache` alone lets two threads that call at once load twice: two links would have two locks for one GPU.
_LOADING = threading.Lock()
