"""CUDA on this machine: TVM's library for it, which `runtime_alone` leaves out of TVM's package, and the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rpc_runtime.execution.cuda_code import register_loader
from rpc_runtime.execution.nvcc import installed_folders

CUDA_LIBRARY = "tvm_runtime_cuda"
DRIVER = "libcuda.so.1"
RUNTIME = "libcudart.so.13"
"""By the name that TVM's library asks for."""


@cache
def load_cuda() -> str:
    """Loads TVM's library for GPUs, once: why that cannot be, and nothing if ``tvm.cuda()`` may be asked now.

    Nothing is asked of a GPU yet, so a process may be forked afterwards.
    """
    if not driver_version():
        return f"there is no NVIDIA driver ({DRIVER} is not found)"
    from tvm.libinfo import package_lib_paths
    from tvm_ffi.libinfo import load_lib_ctypes

    loaded = runtime_library()
    if loaded is None:
        return f"CUDA's runtime, {RUNTIME}, is not found: pip install 'tvm-split[cuda]'"
    needed = _asked(loaded, "cudaRuntimeGetVersion")
    if driver_version() // 1000 < needed // 1000:
        return (
            f"the NVIDIA driver is for CUDA {version_text(driver_version())}, and TVM's library for GPUs needs one for "
            f"{needed // 1000}.0 or newer"
        )
    try:
        load_lib_ctypes("tvm", CUDA_LIBRARY, "RTLD_GLOBAL", extra_lib_paths=package_lib_paths())
    except (OSError, RuntimeError) as error:
        return f"TVM's library for GPUs, lib{CUDA_LIBRARY}.so, cannot be loaded: {error}"
    register_loader()
    return ""


@cache
def runtime_library() -> ctypes.CDLL | None:
    """CUDA's runtime, the one that TVM's library for GPUs is linked with; None where it is not found."""
    return next(filter(None, map(_loaded, _runtime_places())), None)


NO_DEVICE = "the driver knows no GPU that this process may use"


def device_arch(device: Any) -> str:
    """``sm_90``; empty where there is no such device. After `load_cuda`; raises where a driver does not answer."""
    return "sm_" + str(device.compute_version).replace(".", "") if device.exist else ""


def free_device_bytes() -> int:
    """Of the first GPU's memory, what is not taken by any process; 0 where that is not known. After `load_cuda`."""
    import tvm

    try:
        return int(tvm.cuda(0).available_global_memory or 0)
    except Exception:  # a driver that does not answer
        return 0


@cache
def driver_version() -> int:
    """Of CUDA, up to which this machine's driver goes: 13000 is 13.0. 0 without a driver."""
    driver = _loaded(DRIVER)
    return _asked(driver, "cuDriverGetVersion") if driver is not None else 0


def version_text(number: int) -> str:
    """13000 as people write it: 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _runtime_places() -> Iterator[str]:
    """Beside TVM's libraries, as in a kit, where the system looks, and where pip puts it."""
    from tvm.libinfo import package_lib_paths

    for folder in package_lib_paths():
        if (folder / RUNTIME).is_file():
            yield str(folder / RUNTIME)
    yield RUNTIME
    for installed in installed_folders():
        yield str(installed / "lib" / RUNTIME)
    yield str(Path("/usr/local/cuda/lib64") / RUNTIME)


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def _asked(library: ctypes.CDLL, function: str) -> int:
    """What a function of CUDA writes into an integer; 0 where it fails."""
    value = ctypes.c_int(0)
    try:
        failed = library[function](ctypes.byref(value))
    except AttributeError:
        return 0
    return 0 if failed else value.value
