"""Emulate a machine with NVIDIA's driver and no GPU: a library with the driver's name reports a version.

TVM's library for GPUs and CUDA's runtime are the real ones. Every other call to the driver fails as on a machine
without a GPU, so libraries of stages can be loaded, but not run.
"""

import subprocess
from pathlib import Path

import pytest

from rpc_runtime.execution.cuda_code import find_nvcc, installed_folders

NO_DEVICE = 100
OTHERS = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString", "cuLaunchKernelEx"),
    *("cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeTiled"),
)
"""The libraries that TVM's library is linked with."""


def driver_for(version: int, folder: Path) -> dict[str, str]:
    """Return the environment of a process on a machine whose driver supports CUDA up to a version (13000 is 13.0)."""
    lines = [f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}"]
    lines += [f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in OTHERS]
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text("\n".join(lines))
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(folder)}


def require_toolkit() -> None:
    """Skip a test if there is no nvcc, or no CUDA runtime beside it."""
    places = [*installed_folders(), Path("/usr/local/cuda")]
    if find_nvcc() is None or not any(list(place.glob("lib*/libcudart.so.13")) for place in places):
        pytest.skip("CUDA's toolkit is not here")
