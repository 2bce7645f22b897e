"""What a worker reports about itself and its machine (the reply to Describe), and whether a program fits its memory."""

import contextlib
import ctypes
import heapq
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

from rpc_runtime.errors import WorkerError
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
from rpc_runtime.program.program import StageSpec, weight_bytes
from rpc_runtime.program.routes import MachineProgram
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


def _cuda_devices_now() -> list[pb.CudaDevice]:
    """Return the GPUs, with the free memory of the first one, which stages run on."""
    devices = deepcopy(list(_cuda_devices()))
    if devices:
        devices[0].memory_free_bytes = free_device_bytes()
    return devices


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
    machine: str, threads: int, secure: bool, deployments: list[pb.HeldDeployment], cache: Path
) -> pb.DescribeReply:
    """Return the reply to Describe; ``cache`` is the folder of the worker's blobs."""
    cores = own_cores()
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
        cuda_devices=_cuda_devices_now(),
        cuda=_cuda(),
        secure=secure,
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


ON_THE_WAY = 2
"""Weights of a GPU's stage that the host holds at the same time: the one just copied, and the next one."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Constants of glibc's ``malloc.h``."""


def require_room(program: MachineProgram, host_bytes: int, device_bytes: int) -> None:
    """Raise if stages need more host or GPU memory than is free; 0 free bytes mean "not known" and are not checked.

    A stage on the CPU needs host memory for its weights. A stage on a GPU needs them on the GPU, and host memory for
    its `ON_THE_WAY` largest weights, which are being copied. A GPU also needs a buffer for every micro-batch in flight
    from other machines, unless the machine has CPU stages as well. Intermediate tensors of a stage are not counted.

    Raises:
        WorkerError: they do not fit; the message names the machine, the stages, the needed and the free bytes.
    """
    on_host = tuple(stage for stage in program.stages if stage.device == "cpu")
    on_device = tuple(stage for stage in program.stages if stage.device != "cpu")
    passing = max(map(_passing_bytes, on_device), default=0)
    arriving = 0
    if on_device and not on_host:
        arriving = sum(route.depth * route.tensor.size_bytes for route in program.incoming)
    for place, stages, more, why, free in (
        ("", program.stages if passing else on_host, passing, "on their way to its GPU", host_bytes),
        ("'s GPU", on_device, arriving, "for tensors from other machines", device_bytes),
    ):
        needed = weight_bytes(on_device if place else on_host) + more
        if free and needed > free:
            listed = f", {more / 1e9:.1f} GB of it {why}" if more else ""
            raise WorkerError(
                f"machine {program.machine!r}{place} needs {needed / 1e9:.1f} GB for the weights of {len(stages)} "
                f"stages ({', '.join(stage.name for stage in stages)}){listed}, and has {free / 1e9:.1f} GB free. Move "
                "layers to another machine"
            )


def _passing_bytes(stage: StageSpec) -> int:
    return sum(heapq.nlargest(ON_THE_WAY, (weight.tensor.size_bytes for weight in stage.weights)))


def keep_heap() -> None:
    """Make glibc keep the memory of large messages: returning it after each message causes page faults.

    It keeps that of each arena, which `trim_heap` cannot return. So threads share two; call this before they start.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_THRESHOLD, 64 << 20)
        allocator.mallopt(M_TRIM_THRESHOLD, 256 << 20)
        allocator.mallopt(M_ARENA_MAX, 2)


def trim_heap() -> None:
    """Return all free memory to the system, also between used blocks: for the weights of an ended program."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
