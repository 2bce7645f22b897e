"""Runs CUDA kernels: on this machine's GPU, or without one on its CPU.

The CPU runs the very source that nvcc would get, with `emulated_cuda.h`. The host's part of a module runs as it would
on a machine with a GPU, and calls each kernel by its name; what it finds there is a function of a library that the C++
compiler made. This covers TVM's lowering, barriers, instructions of tensor cores, and memory that shared buffers take
in turns.
"""

import atexit
import ctypes
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from rpc_runtime.execution.cuda_runtime import device_arch, load_cuda
from rpc_runtime.execution.loaded_stage import size_of
from tests.helpers.schedules import schedule_harness
from tests.helpers.schedules.gpu_kernels import cuda, cuda_source, needs_headers, nvcc
from tests.helpers.schedules.schedule_harness import Graph, graph_of, lower, rules
from tvm_split.compiler.cuda_code import machine_code

COMPILE_SECONDS = 600
_HEADER = Path(__file__).with_name("emulated_cuda.h")
_OPTIONS = ("-x", "c++", "-std=c++17", "-O1", "-Xcompiler", "-fPIC,-w")
_AXES = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z")


GPU = "" if load_cuda() else device_arch(tvm.cuda())
"""The architecture of this machine's GPU; empty without one."""


def gpu_target(arch: str, **attributes: Any) -> Target:
    """A target for CUDA; without a GPU, its tensors lie in the memory of the CPU."""
    if GPU:
        return cuda(arch)
    described = {
        "kind": "cuda",
        "arch": arch,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "thread_warp_size": 32,
        "target_device_type": int(tvm.cpu().dlpack_device_type()),
        **attributes,
    }
    return Target(described, host={"kind": "llvm"})


SM_90 = gpu_target("sm_90")


@tvm.instrument.pass_instrument
class _Launches:
    """Which extents each kernel is called with, in the order of its arguments: by the kernel's name."""

    def __init__(self) -> None:
        self.tags: dict[str, tuple[str, ...]] = {}

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        for _, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc) and "tirx.kernel_launch_params" in function.attrs:
                tags = tuple(str(tag) for tag in function.attrs["tirx.kernel_launch_params"])
                self.tags[str(function.attrs["global_symbol"])] = tags


@dataclass(frozen=True)
class Order:
    """In which order blocks and their threads run, and the byte that fills memory before it is written."""

    backwards: bool
    byte: int


ORDERS = (Order(False, 0xFF), Order(True, 0x7B), Order(False, 0xFB))
"""With NaN in unwritten memory, and with large numbers of either sign: a maximum ignores NaN."""
Launcher = Callable[..., None]
"""Runs a kernel in an `Order`, with its arguments and then its extents."""


def run_kernels(lowered: tvm.IRModule, inputs: Sequence[np.ndarray], target: Target) -> np.ndarray:
    """``main`` of a module of scheduled kernels; emulated, the same with all `ORDERS`.

    These fill shared memory, registers, and what the virtual machine allocates; not a function's own workspace.

    Raises:
        RuntimeError: the threads of a block wait for different things, or the result depends on their order, or on
            memory that was not written.
    """
    if GPU:
        with machine_code({"kind": "cuda", "arch": GPU}):
            machine = relax.VirtualMachine(relax.build(lowered, target), tvm.cuda())
        return machine["main"](*(tvm.runtime.tensor(array, tvm.cuda()) for array in inputs)).numpy()
    launches = _Launches()
    with tvm.transform.PassContext(instruments=[launches], config={"tirx.disable_assert": True}):
        executable = relax.build(lowered, target)
    source = cuda_source(executable)
    for module in executable.mod.imports:
        module.clear_imports()
    arrays = [tvm.runtime.tensor(array) for array in inputs]
    with TemporaryDirectory() as folder:
        launchers = kernels(source, launches.tags, Path(folder))
        machine = relax.VirtualMachine(executable, tvm.cpu())
        now, results = SimpleNamespace(order=ORDERS[0]), []

        # Both read the order when they are called, because the host's code looks each kernel up only once.
        def launch(launcher: Launcher, *arguments: Any) -> None:
            launcher(now.order, *arguments)

        def fill(_function: Any, name: str, is_before: bool, result: Any, *_arguments: Any) -> None:
            if name == "vm.builtin.alloc_tensor" and not is_before:
                ctypes.memset(result.data_ptr(), now.order.byte, size_of(result))

        machine.set_instrument(fill)
        try:
            for name, launcher in launchers.items():
                tvm_ffi.register_global_func(name, partial(launch, launcher), override=True)
            for now.order in ORDERS:
                results.append(machine["main"](*arrays).numpy())
        finally:
            for name in launchers:
                tvm_ffi.registry.remove_global_func(name)
    if not all(np.array_equal(result, results[0], equal_nan=True) for result in results):
        raise RuntimeError("the result depends on which threads or blocks are first, or on memory that none wrote")
    return results[0]


def evaluate(graph: Graph, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, set[str]]:
    """The result of a graph's kernels for sm_90, and which rules scheduled them. Errors as of `run_kernels`."""
    lowered = lower(graph_of(graph, inputs), SM_90)
    return run_kernels(lowered, inputs, SM_90), rules(lowered)


on_cpu_and_gpu = pytest.mark.parametrize(
    "evaluate",
    [schedule_harness.evaluate, pytest.param(evaluate, marks=[pytest.mark.slow, needs_headers])],
    ids=["cpu", "gpu"],
)
"""Run a test with both targets' kernels; those of the GPU are slow, because each example compiles C++."""


def kernels(source: str, tags: Mapping[str, Sequence[str]], folder: Path) -> dict[str, Launcher]:
    """A source's kernels by name; ``tags`` has the axes of their extents.

    Raises:
        RuntimeError: the source is no C++, also with what stands in for CUDA; or, of a kernel, its threads wait for
            different things.
    """
    loaded = ctypes.CDLL(str(_library(source, tags, folder)))
    return {name: _launcher(loaded[f"launch_{name}"], name, axes) for name, axes in tags.items()}


@cache
def _precompiled_header() -> Path:
    """`emulated_cuda.h`, precompiled: to read it takes half of what a library takes. It goes with this process."""
    folder = TemporaryDirectory(prefix="emulated-cuda-")
    atexit.register(folder.cleanup)
    header = Path(folder.name) / _HEADER.name
    header.write_text(f'#include "{_HEADER}"\n')
    _compile(header, Path(f"{header}.gch"), "-c", "-Xcompiler", "-x,c++-header")
    return header


def _library(source: str, names: Iterable[str], folder: Path) -> Path:
    """A library with ``launch_NAME`` of each kernel of a source.

    Raises:
        RuntimeError: the source is no C++, also with what stands in for CUDA.
    """
    launchers = "".join(
        f'extern "C" const char* launch_{name}(void** values, const int* extents, int backwards, int byte) {{ '
        f"return emulated::launch({name}, values, extents, backwards, byte); }}\n"
        for name in names
    )
    path, library = folder / "kernels.cpp", folder / "kernels.so"
    path.write_text(f'#include "{_precompiled_header()}"\n{source}\n{launchers}')
    _compile(path, library, "-shared")
    return library


def _compile(source: Path, output: Path, *options: str) -> None:
    command = [str(nvcc()), *_OPTIONS, *options, "-o", str(output), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the kernels are no C++ with {_HEADER.name}: {result.stderr}")


def _launcher(launch: Any, name: str, axes: Sequence[str]) -> Launcher:
    launch.restype = ctypes.c_char_p

    def run(order: Order, *arguments: Any) -> None:
        values = [getattr(argument, "value", argument) for argument in arguments[: len(arguments) - len(axes)]]
        extents = dict.fromkeys(_AXES, 1) | dict(zip(axes, arguments[len(values) :], strict=True))
        failure = launch(
            (ctypes.c_void_p * len(values))(*values),
            (ctypes.c_int * len(_AXES))(*(extents[axis] for axis in _AXES)),
            int(order.backwards),
            order.byte,
        )
        if failure:
            raise RuntimeError(f"{name}: {failure.decode()}")

    return run
