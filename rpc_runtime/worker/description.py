"""What a worker reports about itself and its machine (the reply to Describe)."""

import logging
import os
import platform
import resource
import shutil
import socket
import time
from copy import deepcopy
from functools import cache
from importlib import metadata
from pathlib import Path

from rpc_runtime.execution.cuda_runtime import device_arch, free_device_bytes, gpu_facts, load_cuda, runtime_library
from rpc_runtime.hardware import (
    available_memory_bytes,
    boot_id,
    cpu_features,
    memory_domain,
    own_cores,
    total_memory_bytes,
)
from rpc_runtime.program.events import now
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.framing import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_MAXIMUM_CUDA_DEVICES = 16


@cache
def _cuda_devices() -> tuple[pb.CudaDevice, ...]:
    import tvm

    devices: list[pb.CudaDevice] = []
    if load_cuda():
        return ()
    for index in range(_MAXIMUM_CUDA_DEVICES):
        device = tvm.cuda(index)
        try:
            arch = device_arch(device)
            if not arch:
                break
            memory = int(device.total_global_memory or 0)
        except Exception:  # the runtime has no CUDA, or the driver does not answer
            break
        devices.append(pb.CudaDevice(index=index, arch=arch, memory_bytes=memory))
    if devices:
        _add_bus(devices[0])
    return tuple(devices)


def _add_bus(device: pb.CudaDevice) -> None:
    """Add the PCI bus id of a GPU and the speed of its transfers; leave them unset if they cannot be measured."""
    import tvm

    from rpc_runtime.execution.cuda_calls import CudaCalls, bus_speed

    def memory(size_bytes: int) -> tuple[object, int]:
        tensor = tvm.runtime.empty((size_bytes,), "uint8", tvm.cuda(0))
        return tensor, tensor.data_ptr()

    try:
        library = runtime_library()
        if library is None:
            return
        calls = CudaCalls(library)
        device.bus_identity = calls.bus_identity()
        device.bus_bytes_per_second, device.bus_latency_seconds = bus_speed(calls, memory)
    except Exception as error:  # no free GPU memory, or a failing driver: planning works without the bus speed
        logger.warning("the GPU's bus cannot be measured: %s", error)


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _cuda() -> pb.Cuda:
    facts = gpu_facts()
    return pb.Cuda(driver=facts["driver"], problem=facts["problem"], compiler=facts["compiler"])


def describe(
    machine: str, threads: int, certificate_expires: int, deployments: list[pb.HeldDeployment], cache: Path
) -> pb.DescribeReply:
    """Return the reply to Describe; ``cache`` is the folder of the worker's blobs. Without TLS there is no date (0)."""
    cores, devices = own_cores(), deepcopy(list(_cuda_devices()))
    if devices:  # stages run on the first one
        devices[0].memory_free_bytes = free_device_bytes()
    return pb.DescribeReply(
        protocol_version=PROTOCOL_VERSION,
        machine=machine,
        hostname=socket.gethostname(),
        architecture=platform.machine(),
        cpu_features=sorted(cpu_features()),
        cores=cores.count,
        core_numbers=cores.numbers,
        core_quota=cores.quota,
        quota_group=cores.quota_group,
        threads=threads,
        memory_total_bytes=total_memory_bytes(),
        memory_free_bytes=available_memory_bytes(),
        tvm_version=_version("apache-tvm"),
        tvm_ffi_version=_version("apache-tvm-ffi"),
        numpy_version=_version("numpy"),
        cuda_devices=devices,
        cuda=_cuda(),
        secure=certificate_expires > 0,
        certificate_expires=certificate_expires,
        deployments=deployments,
        process_id=os.getpid(),
        clock_nanoseconds=now(),
        boot_id=boot_id(),
        memory_domain=memory_domain(),
        package_version=_version("tvm-split"),
        python_version=platform.python_version(),
        wall_clock_nanoseconds=time.time_ns(),
        cache_free_bytes=_free_bytes(cache),
        file_limit=min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2**32 - 1),
        load=os.getloadavg()[0],
        host_core_count=os.cpu_count() or 0,
    )


def _free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk; 0 if they are not known, as of a removed folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
