"""A worker's memory: whether a program fits, and what glibc keeps of it."""

import contextlib
import ctypes
import gc
import heapq

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.cuda_runtime import free_device_bytes, load_cuda
from rpc_runtime.processes import do_all
from rpc_runtime.program.routes import MachineProgram
from rpc_runtime.program.specs import weight_bytes

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
    weights = ([weight.tensor.size_bytes for weight in stage.weights] for stage in on_device)
    passing = max((sum(heapq.nlargest(ON_THE_WAY, sizes)) for sizes in weights), default=0)
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


def free_on_device(program: MachineProgram) -> int:
    """Return the free memory of the GPU in bytes; 0 if it is not known, or no stage uses a GPU."""
    is_taken = any(stage.device != "cpu" for stage in program.stages)
    return free_device_bytes() if is_taken and not load_cuda() else 0


def keep_heap() -> None:
    """Make glibc keep the memory of large messages: returning it after each message causes page faults.

    All threads share the main arena: the others keep up to 64 MiB each that `give_back` cannot return. Sharing costs no
    processor time, since most threads hold Python's lock. Call this before threads start.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_THRESHOLD, 64 << 20)
        allocator.mallopt(M_TRIM_THRESHOLD, 256 << 20)
        allocator.mallopt(M_ARENA_MAX, 1)


def give_back() -> Exception | None:
    """Make Python, TVM and glibc return all free memory to the system, such as the weights of an ended program.

    TVM keeps the outputs of stages for later outputs of the same size. Returns its error if a GPU has failed.
    """
    import tvm_ffi

    gc.collect()  # links and executors refer to each other
    error = do_all([tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")])
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return error
