"""Times kernels one by one as they run inside a network: with the same threads and the same state of the caches.

All kernels run round-robin in the order of the network, so each kernel finds in the caches what the one before left.
Activations share a few buffers, as in TVM's memory plan. Weights come from a ring buffer as large as the weights of the
whole model. So a kernel reads its weights again only after as much other memory as in the model. Values are synthetic:
no weight has to be sent, and a machine that cannot hold a model can still be measured.
"""

import mmap
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.blob_store import read_blob
from rpc_runtime.execution.in_process import ComputingThread
from rpc_runtime.execution.loaded_stage import Tensor, find_device, first_line, load_library
from rpc_runtime.hardware import available_memory_bytes
from rpc_runtime.processes import Closing
from rpc_runtime.program.events import now
from rpc_runtime.program.measurements import KernelSet, KernelTime, TimedKernel, TimingEffort
from rpc_runtime.program.specs import Bytes, TensorSpec

ALIGNMENT_BYTES = 256
PATTERN_VALUES = 1 << 18
SAMPLES = 1001
"""The most measurements kept per kernel."""
COARSE_CLOCK_SECONDS = 1e-4
"""A CPU-time clock with larger steps, as in some sandboxes, is too coarse to time a kernel."""
DEVICE_CACHE_BYTES = 64 << 20
"""About the size of the largest GPU caches."""
LAUNCHES = 10
"""Launches of a GPU kernel per measurement: back to back, as in a network, with one wait at the end."""


_Key = tuple[Any, ...]
"""Role of an argument ("weight", "input" or "result"), then what distinguishes memories of that role."""
_Views = Callable[[TensorSpec], Tensor]
"""Returns memory of a role for an argument."""
_Sample = tuple[float, float]
"""Seconds of one call: (wall-clock time, CPU time); the wall-clock time twice if the CPU time is not known."""


class KernelTimer(Closing):
    """Times the kernels of one loaded library at a time, with memory for their arguments, in this process.

    The kernels run on a `ComputingThread` with ``threads`` threads. With one CPU thread, its CPU time is measured as
    well as the wall-clock time: see `undisturbed_seconds`.
    """

    def __init__(self, threads: int) -> None:
        self._is_single = threads == 1
        self._thread = ComputingThread(threads)
        self._closed = False
        self._kernels: tuple[TimedKernel, ...] = ()
        self._memories: dict[_Key, _Views] = {}
        self._library: Any = None

    def load(self, kernels: KernelSet, blob_path: Callable[[str], Path]) -> int:
        """Read the library's file, then do as `load_library`; raise `BlobError` if it is missing or damaged."""
        return self.load_library(kernels, read_blob(blob_path(kernels.library.sha256), kernels.library))

    def load_library(self, kernels: KernelSet, library: Bytes) -> int:
        """Load kernels in place of those loaded before; return the bytes allocated for their arguments.

        Raises:
            WorkerError: this machine does not have the device or the memory, or cannot load the library.
        """
        self._unload()
        where = f"timing {len(kernels.kernels)} kernels on machine {kernels.machine!r}"
        self._device = find_device(kernels.device, where)
        self._launches = LAUNCHES if kernels.device == "cuda" else 1
        self._on_cpu = kernels.device == "cpu"
        self._has_cpu_time = self._on_cpu and self._is_single and cpu_clock_step_seconds() < COARSE_CLOCK_SECONDS
        sizes = _sizes(kernels)
        allocated_bytes = sum(sizes.values())
        free = available_memory_bytes() if self._on_cpu else 0
        if free and allocated_bytes > free:
            raise WorkerError(
                f"{where} takes {allocated_bytes / 1e9:.1f} GB for their arguments, and the machine has "
                f"{free / 1e9:.1f} GB free"
            )
        try:
            self._library = load_library(library, where)
            self._memories = {key: self._memory(key, size) for key, size in sizes.items()}
        except WorkerError:
            raise
        except Exception as error:
            raise WorkerError(f"{where}: TVM cannot prepare them: {first_line(error)}") from error
        self._kernels = kernels.kernels
        if self._closed:
            self._unload()
        return allocated_bytes

    def measure(self, effort: TimingEffort, caller_waits: Callable[[], bool] = lambda: True) -> tuple[KernelTime, ...]:
        """Return each kernel's time; stop between two kernels at the time limit, or when ``caller_waits()`` is False.

        `KernelTime.error` is set for kernels that raised and for those that were not timed before the stop.

        Raises:
            WorkerError: no kernels are loaded.
        """
        if self._closed or not self._kernels:
            raise WorkerError("no kernels are loaded here")
        return self._thread.submit(partial(self._measure, effort, caller_waits)).result()

    def close(self) -> None:
        """Free the library and all memory, after waiting for the running kernel. Idempotent."""
        self._closed = True
        self._thread.close()
        self._unload()

    def _unload(self) -> None:
        self._kernels = ()
        self._memories = {}
        self._library = None

    def _measure(self, effort: TimingEffort, caller_waits: Callable[[], bool]) -> tuple[KernelTime, ...]:
        begin = start = now()
        samples: dict[str, deque[_Sample]] = {kernel.function: deque(maxlen=SAMPLES) for kernel in self._kernels}
        errors: dict[str, str] = {}
        rounds = -1  # the first round warms up
        while rounds < effort.minimum_rounds or (now() - start) * 1e-9 < effort.minimum_seconds:
            if rounds == 0:
                start = now()
            for kernel in self._kernels:
                if (now() - begin) * 1e-9 > effort.limit_seconds or self._closed or not caller_waits():
                    return self._times(samples, errors)
                if kernel.function in errors:
                    continue
                try:
                    sample = self._time(kernel)
                except Exception as error:
                    errors[kernel.function] = first_line(error)
                    continue
                if rounds >= 0:
                    samples[kernel.function].append(sample)
            if len(errors) == len(samples):
                break
            rounds += 1
        return self._times(samples, errors)

    def _times(self, samples: dict[str, deque[_Sample]], errors: dict[str, str]) -> tuple[KernelTime, ...]:
        late = "the time limit came before it was timed"
        return tuple(
            KernelTime(name, undisturbed_seconds(kernel_samples), len(kernel_samples))
            if kernel_samples and name not in errors
            else KernelTime(name, 0.0, 0, errors.get(name, late))
            for name, kernel_samples in samples.items()
        )

    def _time(self, kernel: TimedKernel) -> _Sample:
        function = self._library.get_function(kernel.function, True)
        calls = [self._arguments(kernel) for _ in range(self._launches)]
        if not self._on_cpu:
            self._device.sync()
        cpu_start = time.thread_time_ns()
        start = now()
        for arguments in calls:
            function(*arguments)
        if not self._on_cpu:
            self._device.sync()
        clock = now() - start
        cpu = time.thread_time_ns() - cpu_start if self._has_cpu_time else clock
        return clock * 1e-9 / len(calls), cpu * 1e-9 / len(calls)

    def _arguments(self, kernel: TimedKernel) -> list[Tensor]:
        return [self._memories[key](spec) for key, spec in _roles(kernel)]

    def _memory(self, key: _Key, size_bytes: int) -> _Views:
        role, place = key[:2]
        if role == "weight":
            ring = _Ring(size_bytes, place) if self._on_cpu else _DeviceCopies(size_bytes, place, self._device)
            return ring.next
        tensor = tvm.runtime.from_dlpack(_harmless(size_bytes, place if role == "input" else "uint8"))
        return partial(_view, tensor if self._on_cpu else tensor.copyto(self._device))


def undisturbed_seconds(samples: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a call without contention, from (wall-clock, CPU) seconds of several calls.

    Other programs only make calls longer. The wall-clock time of a short kernel is exact between their time slices, so
    its lower quartile is used. A kernel longer than a time slice is always interrupted, but its CPU time excludes that.
    The result is the smaller one of that quartile and the median CPU time.
    """
    clocks = sorted(clock for clock, _ in samples)
    return min(clocks[len(clocks) // 4], statistics.median(cpu for _, cpu in samples))


@cache
def cpu_clock_step_seconds() -> float:
    """Return the resolution of the clock of a thread's CPU time in seconds."""
    start = time.thread_time_ns()
    while (end := time.thread_time_ns()) == start:
        pass
    return (end - start) * 1e-9


class _Ring:
    """A ring buffer for weights: each weight follows the previous one; after the end comes the beginning."""

    def __init__(self, size_bytes: int, dtype: str) -> None:
        self._memory = _harmless(size_bytes, dtype)
        self._position = 0

    def next(self, spec: TensorSpec) -> Tensor:
        if self._position + spec.size_bytes > self._memory.size:
            self._position = 0
        # A view made by TVM would have a byte offset, which kernels reject; a numpy slice has its own address.
        weight_slice = self._memory[self._position : self._position + max(spec.size_bytes, 1)]
        self._position += _aligned(spec.size_bytes)
        return _view(tvm.runtime.from_dlpack(weight_slice), spec)


class _DeviceCopies:
    """Replaces `_Ring` on a GPU, where a slice has no address of its own: copies of each weight, used round-robin."""

    def __init__(self, size_bytes: int, dtype: str, device: Any) -> None:
        self._size_bytes = min(size_bytes, DEVICE_CACHE_BYTES)
        self._dtype = dtype
        self._device = device
        self._copies: dict[int, deque[Tensor]] = {}

    def next(self, spec: TensorSpec) -> Tensor:
        size = max(spec.size_bytes, 1)
        if size not in self._copies:
            count = min(LAUNCHES, -(-self._size_bytes // size))
            values = tvm.runtime.from_dlpack(_harmless(size, self._dtype))
            self._copies[size] = deque(values.copyto(self._device) for _ in range(count))
        self._copies[size].rotate(1)
        return _view(self._copies[size][0], spec)


def _harmless(size_bytes: int, dtype: str) -> Bytes:
    """Return memory with safe values: floats from 0.1 to 1, so that none is denormal, and zeros for other dtypes.

    Zero is a valid index of every axis.
    """
    # Not numpy's allocator: it requests huge pages, which TVM does not use.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1), flags=private), np.uint8)
    if np.dtype(dtype).kind in "biu":
        memory[:] = 0
        return memory
    pattern = _pattern(dtype)
    for offset in range(0, memory.size, pattern.size):
        memory[offset : offset + pattern.size] = pattern[: memory.size - offset]
    return memory


@cache
def _pattern(dtype: str) -> Bytes:
    """Return random values of a dtype as bytes; cached, because a network has hundreds of small tensors."""
    values = np.random.default_rng(0).uniform(0.1, 1.0, PATTERN_VALUES)
    return values.astype(np.float32).astype(dtype).view(np.uint8)


def _view(memory: Tensor, spec: TensorSpec) -> Tensor:
    return memory._create_view(spec.shape, spec.dtype)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _roles(kernel: TimedKernel) -> Iterator[tuple[_Key, TensorSpec]]:
    """Yield (key of its memory, argument) for each argument of a kernel.

    Weights come from the ring of their dtype. The n-th inputs of a dtype share one buffer over all kernels. Results
    use buffers that are never inputs, so that inputs keep their safe values.
    """
    first_result = len(kernel.arguments) - kernel.results
    counts: Counter[str] = Counter()
    for position, spec in enumerate(kernel.arguments):
        if position >= first_result:
            yield ("result", position - first_result), spec
        elif position in kernel.weights:
            yield ("weight", spec.dtype), spec
        else:
            counts[spec.dtype] += 1
            yield ("input", spec.dtype, counts[spec.dtype]), spec


def _sizes(kernels: KernelSet) -> dict[_Key, int]:
    """Return the size in bytes of each ring and buffer, by its key in `_roles`."""
    sizes: dict[_Key, int] = {}
    weights: Counter[_Key] = Counter()
    for kernel in kernels.kernels:
        for key, spec in _roles(kernel):
            size = _aligned(spec.size_bytes)
            sizes[key] = max(sizes.get(key, 1), size)
            if key[0] == "weight":
                weights[key] += size
    for key, size in weights.items():
        sizes[key] = max(sizes[key], _aligned(kernels.weight_bytes * size // max(weights.total(), 1)))
    return sizes
