"""Compiles ``cuda.c``, the stand-in for CUDA's runtime, and ``nccl.c``, the stand-in for NCCL."""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from rpc_runtime.execution.device_transfers import DeviceTransfers
from rpc_runtime.program.specs import StageSpec, TensorSpec
from tests.helpers.rpc_runtime.joined_executors import PlainStage

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CUDA, NCCL = (str(Path(__file__).with_name(name)) for name in ("cuda.c", "nccl.c"))


def compiled(folder: Path, *options: str) -> Path:
    library = folder / "libcudart.so.13"
    # Its functions must call each other, even if the process has loaded CUDA's own runtime globally.
    command = ["cc", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wall", "-Werror", "-pthread", *options]
    command += ["-o", str(library), CUDA]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return library


def compiled_nccl(cuda: Path, folder: Path, *options: str) -> Path:
    """Return the stand-in for NCCL, linked with the stand-in for CUDA's runtime."""
    library = folder / "libnccl.so.2"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-pthread", *options, "-o", str(library)]
    command += [NCCL, str(cuda)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return library


def on_host(spec: TensorSpec) -> Any:
    """Allocate host memory as the memory of a device."""
    return tvm.runtime.empty(spec.shape, spec.dtype)


class Launched:
    """`PlainStage` on the device: its kernel runs on the NULL stream, after the operations that are queued there."""

    def __init__(self, stage: StageSpec, cuda: Any, transfers: DeviceTransfers) -> None:
        self.stage, self._cuda, self._transfers = stage, cuda, transfers

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        inputs = self._transfers.begin(inputs)
        outputs = [tvm.runtime.empty(spec.shape, spec.dtype) for spec in self.stage.outputs]

        def compute(argument: None) -> None:
            values = PlainStage(self.stage).run([np.from_dlpack(tensor).copy() for tensor in inputs])
            for output, value in zip(outputs, values, strict=True):
                np.from_dlpack(output)[...] = value

        kernel = Kernel(compute)
        self._cuda.standInLaunch(kernel)
        self._transfers.end()
        return outputs
