"""Compile the kernels of CUDA stages to machine code, and check what that code needs of a worker."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.execution.cuda_code import (
    NvccError,
    fatbin,
    find_nvcc,
    marked,
    packed,
    register_loader,
    toolkit_version,
    unspilled,
)
from rpc_runtime.execution.cuda_runtime import version_text
from schedules.tuning.devices import GpuNeeds
from tvm_split.errors import CompileError, TuningError

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")
RUNTIME_DRIVER = 13000
"""The oldest driver for TVM 0.27's GPU library and its CUDA runtime, as CUDA's version number: 13000 is 13.0."""
_finish: ContextVar[Callable[[str], str] | None] = ContextVar("finish", default=None)


@dataclass(frozen=True)
class CudaNeeds:
    """The GPU architecture and CUDA version that a stage is compiled for; ``toolkit`` is None for source code."""

    arch: str
    toolkit: tuple[int, int] | None


def needs_of(target: Mapping[str, Any]) -> CudaNeeds | None:
    """Return what a stage compiled by this host for ``target`` needs of a GPU; None for a target without CUDA."""
    if target["kind"] != "cuda":
        return None
    return CudaNeeds(str(target["arch"]), toolkit_version() if find_nvcc() is not None else None)


@contextmanager
def machine_code(target: Mapping[str, Any]) -> Iterator[None]:
    """Make TVM's CUDA compilation inside the block produce machine code instead of source, if nvcc is installed.

    Raises:
        CompileError: nvcc rejects the kernels or the architecture.
    """
    if target["kind"] != "cuda":
        yield
        return
    arch = str(target["arch"])
    # In a process with a GPU, TVM requests the machine code at once; in others, when the library is loaded.
    tvm_ffi.register_global_func("tvm_callback_cuda_postproc", _finished, override=True)
    register_loader()

    def finish(source: str) -> str:
        if find_nvcc() is None:
            return marked(source, arch)
        try:
            return packed(fatbin(source, arch), arch)
        except NvccError as error:
            raise CompileError(f"CUDA kernels cannot be compiled: {error}") from error

    token = _finish.set(finish)
    try:
        yield
    finally:
        _finish.reset(token)


def _finished(source: str, target: Any) -> str:
    finish = _finish.get()
    return source if finish is None else finish(source)


def tuning_needs(target: Mapping[str, Any]) -> GpuNeeds | None:
    """Return how this host compiles tuning candidates, and what their code needs of a GPU; None without CUDA.

    Raises:
        TuningError: nvcc rejects the architecture.
    """
    if target["kind"] != "cuda":
        return None
    arch = str(target["arch"])
    nvcc, version = find_nvcc(), toolkit_version()
    if nvcc is not None:
        try:
            unspilled("", arch)
        except NvccError as error:
            raise TuningError(f"nothing can be tuned for arch {arch!r}: {error}") from error
    driver = max(RUNTIME_DRIVER, version[0] * 1000 if version is not None else 0)
    return GpuNeeds(arch, driver, nvcc is None, _code_for(arch, nvcc is None))


def _code_for(arch: str, is_source: bool) -> Callable[[str], str]:
    """Return a function that compiles a candidate's source; nested, so that it is pickled by value for builders."""

    def code(source: str) -> str:
        from rpc_runtime.execution.cuda_code import marked, packed, unspilled

        return marked(source, arch) if is_source else packed(unspilled(source, arch), arch)

    return code


def cuda_misfit(needs: CudaNeeds, worker: WorkerDescription) -> str:
    """Say why a worker cannot run CUDA code and what to do, as a text that follows its name; empty if it can."""
    if not worker.cuda_devices:
        return f"has no CUDA device: {worker.cuda.problem or 'it does not say why'}"
    device = worker.cuda_devices[0].arch
    device_version, code_version = _numbers(device), _numbers(needs.arch)
    if device_version is None or code_version is None:
        return ""
    if device_version[:2] < code_version[:2] or (code_version[2] and device_version[:2] != code_version[:2]):
        return f"has a GPU of {device}, which does not run code for {needs.arch}: give the machine arch: {device}"
    if worker.cuda.driver < RUNTIME_DRIVER:
        return _old_driver(worker, RUNTIME_DRIVER, "TVM's library for GPUs")
    if needs.toolkit is None:
        if not worker.cuda.compiler:
            return (
                "has no nvcc, and the kernels are source, since there was none where they were compiled: compile again "
                "where there is one (pip install 'tvm-split[cuda]')"
            )
        return ""
    # Machine code runs with every driver of its CUDA major version. PTX, for later GPU generations, does not.
    same_kind = device_version[0] == code_version[0]
    least = needs.toolkit[0] * 1000 + (0 if same_kind else needs.toolkit[1] * 10)
    if worker.cuda.driver < least:
        code = "machine code" if same_kind else f"PTX for {needs.arch}, which this GPU of {device} takes"
        return _old_driver(worker, least, f"{code} of CUDA {needs.toolkit[0]}.{needs.toolkit[1]}")
    return ""


def _old_driver(worker: WorkerDescription, least: int, what: str) -> str:
    return (
        f"has a driver for CUDA {version_text(worker.cuda.driver)}, and {what} needs one for {version_text(least)} or "
        "newer: update the driver, or plan the stage for another machine"
    )


def _numbers(arch: str) -> tuple[int, int, str] | None:
    """Parse a CUDA architecture: ``sm_90a`` gives (9, 0, "a"); None if it cannot be parsed."""
    match = _ARCH.fullmatch(arch)
    return (int(match.group(1)), int(match.group(2)), match.group(3)) if match else None
