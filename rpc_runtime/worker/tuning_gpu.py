"""Functions that a tuner calls on a worker's GPU, besides kernels: describe the GPU, and evict its cache."""

from __future__ import annotations

import json
import socket
from functools import cache
from typing import Any

from rpc_runtime.execution.cuda_code import toolkit_text
from rpc_runtime.execution.cuda_runtime import NO_DEVICE, device_arch, driver_version, load_cuda

UNKNOWN_CACHE_BYTES = 128 << 20
"""Assumed L2 cache size if a GPU does not report it: more than any GPU had when this was written."""


def register_tuning_functions() -> None:
    """Register the functions that `schedules.tuning.devices` calls by name through TVM's RPC."""
    import tvm_ffi

    tvm_ffi.register_global_func("tvm_split.tuning.gpu", describe_gpu, override=True)
    tvm_ffi.register_global_func("tvm_split.tuning.evict", evict, override=True)


def describe_gpu() -> str:
    """Describe the first GPU, on which kernels are measured, as JSON.

    Keys: ``hostname``; ``arch`` (empty without a GPU; ``problem`` says why); ``driver``, its CUDA version (13000 is
    13.0); ``compiler``, nvcc's version if there is one.
    """
    problem, arch = load_cuda(), ""
    if not problem:
        import tvm

        try:
            arch = device_arch(tvm.cuda(0))
        except Exception as error:  # the driver does not answer
            problem = str(error)
    facts = {
        "hostname": socket.gethostname(),
        "arch": arch,
        "problem": "" if arch else problem or NO_DEVICE,
        "driver": driver_version(),
        "compiler": toolkit_text() if arch else "",
    }
    return json.dumps(facts)


def evict(*arguments: Any) -> None:
    """Fill the L2 cache of the arguments' GPU with other data, and then with the first argument.

    Copies on the device go through that cache. They use the stream of the kernels, so that a later timed run begins
    after them.
    """
    first = arguments[0]
    source, destination = _memory(first.device)
    source.copyto(destination)
    copy_of_first = _empty(first.shape, str(first.dtype), first.device)
    first.copyto(copy_of_first)


@cache
def _memory(device: Any) -> tuple[Any, Any]:
    """Return two tensors, each of twice the L2 cache's size; they are kept during the session."""
    size = 2 * (device.l2_cache_size_bytes or UNKNOWN_CACHE_BYTES)
    return _empty((size,), "uint8", device), _empty((size,), "uint8", device)


@cache
def _empty(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    import tvm

    return tvm.runtime.empty(shape, dtype, device)
