"""What a tuner asks of a worker's GPU, besides running kernels: which it is, and that its cache forgets."""

from __future__ import annotations

import json
import socket
from functools import cache
from typing import Any

from rpc_runtime.execution.cuda_runtime import NO_DEVICE, device_arch, driver_version, load_cuda
from rpc_runtime.execution.nvcc import toolkit_text

UNKNOWN_CACHE_BYTES = 128 << 20
"""Of a GPU that does not say how large its second-level cache is: more than any had when this was written."""


def register_tuning_functions() -> None:
    """From now on TVM's RPC in this process has what `schedules.tuning.devices` asks for by name."""
    import tvm_ffi

    tvm_ffi.register_global_func("tvm_split.tuning.gpu", describe_gpu, override=True)
    tvm_ffi.register_global_func("tvm_split.tuning.evict", evict, override=True)


def describe_gpu() -> str:
    """The first GPU, which kernels are measured on, as JSON: its ``arch`` (empty: there is none, and ``problem`` says
    why), the driver's version of CUDA (13000 is 13.0), and nvcc's, if there is one."""
    problem, arch = load_cuda(), ""
    if not problem:
        import tvm

        try:
            arch = device_arch(tvm.cuda(0))
        except Exception as error:  # a driver that does not answer
            problem = str(error)
    said = {
        "hostname": socket.gethostname(),
        "arch": arch,
        "problem": "" if arch else problem or NO_DEVICE,
        "driver": driver_version(),
        "compiler": toolkit_text() if arch else "",
    }
    return json.dumps(said)


def evict(*arguments: Any) -> None:
    """Fill the second-level cache of the arguments' GPU with something else, and then with the first argument.

    Copies on the device go through that cache. They are on the stream that kernels are on, so that a run that is timed
    afterwards begins after them.
    """
    first = arguments[0]
    source, destination = _memory(first.device)
    source.copyto(destination)
    copy_of_first = _empty(first.shape, str(first.dtype), first.device)
    first.copyto(copy_of_first)


@cache
def _memory(device: Any) -> tuple[Any, Any]:
    """Two tensors of twice the cache each, that are kept for as long as the session."""
    size = 2 * (device.l2_cache_size_bytes or UNKNOWN_CACHE_BYTES)
    return _empty((size,), "uint8", device), _empty((size,), "uint8", device)


@cache
def _empty(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    import tvm

    return tvm.runtime.empty(shape, dtype, device)
