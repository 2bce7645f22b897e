"""CUDA on this machine: the driver, and TVM's CUDA library, which `load_cuda` loads if there is a driver."""

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rpc_runtime.execution.cuda_code import installed_folders, register_loader, toolkit_text

CUDA_LIBRARY = "tvm_runtime_cuda"
DRIVER = "libcuda.so.1"
RUNTIME = "libcudart.so.13"
"""The name that TVM's CUDA library is linked with."""


@cache
def load_cuda() -> str:
    """Load TVM's CUDA library once; return why it cannot be loaded, or "" if ``tvm.cuda()`` may be used now.

    This does not initialize a GPU, so the process may still be forked afterwards.
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
    """Return the CUDA runtime that TVM's CUDA library is linked with; None if it is not found."""
    return next(filter(None, map(_loaded, _runtime_places())), None)


NO_DEVICE = "the driver knows no GPU that this process may use"


def device_arch(device: Any) -> str:
    """Return a device's architecture, such as ``sm_90``; empty if there is no such device.

    Requires `load_cuda`. Raises if the driver does not answer.
    """
    return "sm_" + str(device.compute_version).replace(".", "") if device.exist else ""


def gpu_facts() -> dict[str, Any]:
    """Return facts about CUDA on this machine.

    Keys: ``arch`` of the first GPU (empty without one; ``problem`` says why); ``driver``, its CUDA version (13000 is
    13.0; 0: no driver); ``compiler``, nvcc's version if there is a GPU and nvcc.
    """
    problem, arch = load_cuda(), ""
    if not problem:
        import tvm

        try:
            arch = device_arch(tvm.cuda(0))
        except Exception as error:  # the driver does not answer
            problem = str(error).partition("\n")[0]
    problem = "" if arch else problem or NO_DEVICE
    return {"arch": arch, "problem": problem, "driver": driver_version(), "compiler": toolkit_text() if arch else ""}


def free_device_bytes() -> int:
    """Return the free memory of the first GPU in bytes; 0 if it is not known. Requires `load_cuda`."""
    import tvm

    try:
        return int(tvm.cuda(0).available_global_memory or 0)
    except Exception:  # the driver does not answer
        return 0


@cache
def driver_version() -> int:
    """Return the newest CUDA version that this machine's driver supports: 13000 is 13.0; 0 without a driver."""
    driver = _loaded(DRIVER)
    return _asked(driver, "cuDriverGetVersion") if driver is not None else 0


def version_text(number: int) -> str:
    """Return CUDA's version number as text: 13000 is "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _runtime_places() -> Iterator[str]:
    """Yield places of the CUDA runtime: beside TVM's libraries (worker kits), the system's, and pip's."""
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
    """Return the integer that a CUDA function writes; 0 if the call fails."""
    value = ctypes.c_int(0)
    try:
        failed = library[function](ctypes.byref(value))
    except AttributeError:
        return 0
    return 0 if failed else value.value
