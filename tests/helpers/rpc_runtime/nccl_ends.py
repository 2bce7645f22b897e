"""Ends of links over NCCL without a GPU: stand-ins for CUDA and NCCL, and owners whose values are numpy arrays.

Each GPU has a copy of NCCL's stand-in of its own, with its own lock, so that several may be in one process. What is
received is in memory of the stand-in's device, which the stand-in checks.
"""

import atexit
import ctypes
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from rpc_runtime.execution.cuda_calls import CudaCalls, memory_at
from rpc_runtime.program.specs import TensorSpec
from tests.helpers.rpc_runtime.cuda_stand_in import compiled, compiled_nccl

FOLDER_VARIABLE = "TVM_SPLIT_TEST_STAND_INS"


class ArrayDevice:
    """The GPU at a bus id, with numpy arrays as values; the next communicator is made on the one used last."""

    def __init__(self, bus: str) -> None:
        self.calls = _calls()
        self._bus = bus

    def library(self, name: str, file: str) -> ctypes.CDLL:
        device().standInAt(self._bus.encode())
        return _copied(file, self._bus)

    def memory(self, tensor: TensorSpec) -> tuple[int, np.ndarray]:
        memory = _array(tensor)
        return self.address(memory), memory

    def address(self, value: np.ndarray) -> int:
        return int(value.ctypes.data)


@cache
def _calls() -> CudaCalls:
    return CudaCalls(device())


@cache
def _copied(file: str, bus: str) -> ctypes.CDLL:
    folder = stand_ins()
    return ctypes.CDLL(shutil.copy(folder / file, folder / f"{bus}-{os.getpid()}.so"))


@cache
def device() -> ctypes.CDLL:
    """Return the stand-in for CUDA's runtime."""
    cuda = ctypes.CDLL(str(stand_ins() / "libcudart.so.13"))
    cuda.cudaMalloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
    cuda.cudaFree.argtypes = (ctypes.c_void_p,)
    return cuda


@cache
def stand_ins() -> Path:
    """Return the folder of the two libraries, which the processes of a test share."""
    if FOLDER_VARIABLE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="stand-ins-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        compiled_nccl(compiled(folder), folder)
        os.environ[FOLDER_VARIABLE] = str(folder)
    return Path(os.environ[FOLDER_VARIABLE])


def _array(spec: TensorSpec) -> np.ndarray:
    """Allocate memory of the device."""
    pointer, size = ctypes.c_void_p(), max(spec.size_bytes, 1)
    assert device().cudaMalloc(ctypes.byref(pointer), size) == 0
    memory = memory_at(pointer.value or 0, size, device().cudaFree, pointer.value)
    return memory[: spec.size_bytes].view(np.dtype(spec.dtype)).reshape(spec.shape)
