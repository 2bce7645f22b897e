"""Loads a stage's library and weights into TVM's runtime and runs it. The only module that computes; it imports tvm."""

import contextlib
import fcntl
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np
import tvm
import tvm_ffi
from tvm.runtime.vm import VirtualMachine

from rpc_runtime.errors import BlobError, StageError, WorkerError, out_of_files
from rpc_runtime.execution.cuda_runtime import load_cuda
from rpc_runtime.program.events import now
from rpc_runtime.program.specs import BlobSpec, Bytes, StageSpec, TensorSpec, WeightSpec
from rpc_runtime.transports.carrier import ALIGNMENT_BYTES, Slot

Tensor = Any
"""A ``tvm.runtime.Tensor``; TVM has no type annotations."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_loads = itertools.count(1)
BUILTIN = "vm.builtin."
"""The beginning of the names of functions with which TVM's virtual machine allocates and checks."""


class TensorSlot(Slot):
    """A slot whose ``value`` is a TVM tensor."""

    def copy_in(self, value: Tensor) -> None:
        value._copyto(self.value)


def tensor_slot(tensor: TensorSpec, memory: Bytes | None = None) -> Slot:
    """Return a slot in host memory over a TVM tensor; TVM uses ``memory`` without a copy only if it is aligned."""
    if memory is None or not tensor.size_bytes:  # numpy may move the address of an empty array
        block = np.empty(tensor.size_bytes + ALIGNMENT_BYTES, np.uint8)
        start = -block.ctypes.data % ALIGNMENT_BYTES
        memory = block[start : start + max(tensor.size_bytes, 1)]
    value = tvm.runtime.from_dlpack(memory)._create_view(tensor.shape, tensor.dtype)
    return TensorSlot(memory[: tensor.size_bytes], value)


def tensor_bytes(tensor: Tensor) -> Bytes:
    """Return a tensor's content as a flat array of bytes; without a copy if it is in host memory."""
    tensor = on_host(tensor)
    dtype = np.dtype(str(tensor.dtype))
    if dtype.isbuiltin != 1:  # numpy imports bfloat16 and similar dtypes only as bytes
        tensor = tensor._create_view((math.prod(tensor.shape) * dtype.itemsize,), "uint8")
    return np.from_dlpack(tensor).reshape(-1).view(np.uint8)


def tensor_from_array(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a copy of an array of any dtype as a TVM tensor."""
    flat = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    return tvm.runtime.tensor(flat)._create_view(array.shape, array.dtype.name)


def array_from_tensor(tensor: Tensor, spec: TensorSpec) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor as a numpy array."""
    return tensor_bytes(tensor).copy().view(np.dtype(spec.dtype)).reshape(spec.shape)


def size_of(tensor: Tensor) -> int:
    """Return the size of a tensor's content in bytes."""
    return int(tensor.numel() * np.dtype(str(tensor.dtype)).itemsize)


@dataclass(frozen=True, eq=False)
class LoadedWeight:
    """A weight on a device; stages that use it share it."""

    tensor: Tensor


class WeightCache:
    """The loaded weights of a process by content and device, as long as something holds them. Thread-safe.

    Several stages may use one under different names. A deployment that replaces another one on the same machines finds
    its weights here.
    """

    def __init__(self) -> None:
        self._weights: WeakValueDictionary[tuple[Any, ...], LoadedWeight] = WeakValueDictionary()

    def missing(self, stage: StageSpec) -> StageSpec:
        """Return the stage with only those weights that are not loaded."""
        weights = tuple(weight for weight in stage.weights if (*weight.content, stage.device) not in self._weights)
        return replace(stage, weights=weights)

    def loaded(self, spec: WeightSpec, device: str, load: Callable[[], Tensor]) -> LoadedWeight:
        """Return a weight; load it if it is missing."""
        key = (*spec.content, device)
        weight = self._weights.get(key)
        if weight is None:
            weight = LoadedWeight(load())
            self._weights[key] = weight
        return weight


class LoadedStage:
    """A stage that is ready to run.

    On a GPU, each run begins by copying inputs from the host, and ends by synchronizing the device; ``begin`` and
    ``finish`` replace these steps. On a CPU, or with ``finish``, the memory of inputs may be reused after the run.

    Raises:
        WorkerError: this machine cannot run the stage: no such device, another architecture, too little memory.
        BlobError: the library or a weight is damaged.
    """

    def __init__(
        self,
        stage: StageSpec,
        library: Bytes,
        read: Callable[[BlobSpec], Bytes],
        cache: WeightCache,
        begin: Callable[[Sequence[Any]], Sequence[Tensor]] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.stage = stage
        where = f"stage {stage.name!r} on machine {stage.machine!r}"
        self._device = find_device(stage.device, where)
        self._on_cpu = stage.device == "cpu"
        self._begin = begin or (None if self._on_cpu else self._on_device)
        self._finish = finish or (None if self._on_cpu else self._device.sync)
        self._reuses_inputs = self._on_cpu or finish is not None
        # Whether each output is a view of an input; set by the first run, because it is the same in every run, and the
        # check takes as long as sending a small tensor to another machine.
        self._are_views: list[bool] | None = None
        try:
            self._machine = VirtualMachine(load_library(library, where), self._device)
            self._main = self._machine["main"]
        except WorkerError:
            raise
        except Exception as error:
            raise WorkerError(f"{where}: TVM cannot load the library: {first_line(error)}") from error
        self.weights = tuple(
            cache.loaded(spec, stage.device, partial(_loaded, spec, read, self._device, where))
            for spec in stage.weights
        )
        self._tensors = [weight.tensor for weight in self.weights]

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the outputs for one micro-batch, in memory that neither an input shares nor a later call changes.

        Raises:
            StageError: the library raised, or its outputs do not match the stage's specification.
        """
        stage = self.stage
        if self._begin is not None:
            inputs = self._begin(inputs)
        try:
            result = self._main(*inputs, *self._tensors)
            outputs = self._outputs(result, inputs)
            if self._finish is not None:
                self._finish()
        except StageError:
            raise
        except Exception as error:
            text = f"stage {stage.name!r} on machine {stage.machine!r} failed: {first_line(error)}"
            raise StageError(text) from error
        return outputs

    def run_kernels(self, inputs: Sequence[Any], record: Callable[[str, int, int], None]) -> list[Tensor]:
        """Return what `run` does; call ``record(function, start, end)`` after each kernel (on a GPU, after its end)."""
        starts: list[int] = []

        def instrument(function: Any, name: str, is_before: bool, result: Any, *arguments: Any) -> int:
            if not name.startswith(BUILTIN):
                if not self._on_cpu:
                    self._device.sync()
                if is_before:
                    starts.append(now())
                else:
                    record(name, starts.pop(), now())
            return 0

        self._machine.set_instrument(instrument)
        try:
            return self.run(inputs)
        finally:
            self._machine.set_instrument(None)

    def _on_device(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.copyto(self._device) if _is_on_host(tensor) else tensor for tensor in inputs]

    def _outputs(self, result: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        stage = self.stage
        if self._are_views is None:
            _require_announced(result, stage)
            self._are_views = [
                self._reuses_inputs and _shares_memory(tensor, spec, inputs, stage.inputs)
                for tensor, spec in zip(result, stage.outputs, strict=True)
            ]
        return [
            self._copied(tensor, spec) if is_view else tensor
            for tensor, spec, is_view in zip(result, stage.outputs, self._are_views, strict=True)
        ]

    def _copied(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        if not self._on_cpu:
            return tensor.copyto(self._device)
        copy = tensor_slot(spec)
        copy.copy_in(tensor)
        return copy.value


def _require_announced(result: Any, stage: StageSpec) -> None:
    """Raise a StageError if the library's outputs do not match the stage's specification."""
    where = f"stage {stage.name!r} on machine {stage.machine!r} should return"
    if not isinstance(result, tvm_ffi.Array) or len(result) != len(stage.outputs):
        raise StageError(
            f"{where} a tuple of {len(stage.outputs)} tensors, and returned {type(result).__name__}"
            + (f" of {len(result)}" if isinstance(result, tvm_ffi.Array) else "")
        )
    for tensor, spec in zip(result, stage.outputs, strict=True):
        if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != spec.dtype:
            raise StageError(f"{where} {spec}, and returned {tensor.dtype}[{', '.join(map(str, tensor.shape))}]")


def _shares_memory(
    tensor: Tensor, spec: TensorSpec, inputs: Sequence[Tensor], input_specs: Sequence[TensorSpec]
) -> bool:
    """Return whether an output overlaps an input, whose memory the next micro-batch will overwrite."""
    begin = tensor.data_ptr()
    for input_tensor, input_spec in zip(inputs, input_specs, strict=True):
        start = input_tensor.data_ptr()
        if begin < start + input_spec.size_bytes and start < begin + spec.size_bytes:
            return True
    return False


def _is_on_host(tensor: Tensor) -> bool:
    return bool(tensor.device.dlpack_device_type() == 1)


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is in host memory, else a copy there."""
    return tensor if _is_on_host(tensor) else tensor.copyto(tvm.cpu())


def find_device(kind: str, where: str) -> Any:
    """Return the device of a kind (``"cpu"`` or ``"cuda"``); raise a `WorkerError` about ``where`` if there is none."""
    if kind == "cpu":
        return tvm.cpu()
    if kind != "cuda":
        raise WorkerError(f"{where} wants the device {kind!r}; workers know 'cpu' and 'cuda'")
    problem = load_cuda()
    device = tvm.cuda(0)
    try:
        present = not problem and bool(device.exist)
    except Exception:
        present = False
    if not present:
        raise WorkerError(
            f"{where} was compiled for the device 'cuda', and this machine has only 'cpu' "
            f"({problem or 'no CUDA device that TVM can use'}). Place the stage on a machine with a GPU, or compile it "
            "for 'cpu'"
        )
    return device


@contextlib.contextmanager
def library_file(content: Bytes) -> Iterator[int]:
    """Yield the descriptor of a sealed, unnamed file in memory with ``content``; close it afterwards."""
    descriptor = os.memfd_create("library.so", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.data)
        file.flush()
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield descriptor


def load(descriptor: int) -> Any:
    """Return the library in a file as a TVM module, whose last reference unloads it. The file may then be closed.

    Each file can be loaded once: TVM keeps one context per file, so two stages must never share one.
    """
    # dlopen caches libraries by path, but descriptor numbers are reused. So each path contains the number of the load,
    # in binary: "/." is 1 and "/" is 0.
    number = f"{next(_loads):b}".replace("1", "/.").replace("0", "/")
    # What `tvm_ffi.load_module` calls for a name that ends in .so.
    return tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(f"/proc/self/fd{number}/{descriptor}", "so")


def load_library(content: Bytes, where: str) -> Any:
    """Return a private copy of a library as a TVM module; raise `WorkerError` about ``where`` if it cannot run here."""
    try:
        with library_file(content) as descriptor:
            return load(descriptor)
    except Exception as error:
        text = f"{where}: TVM cannot load the library: {first_line(error)}"
        has_files = Path("/proc/self/fd").is_dir()
        advice = "Give the machine its right target and compile again" if has_files else "Mount /proc on this machine"
        raise WorkerError(out_of_files(text) or f"{text}. {advice}") from error


def _loaded(spec: WeightSpec, read: Callable[[BlobSpec], Bytes], device: Any, where: str) -> Tensor:
    content = read(spec.blob)
    if content.size != spec.tensor.size_bytes:
        raise BlobError(
            f"{where}: weight {spec.tensor} takes {spec.tensor.size_bytes} bytes, and its blob {spec.blob.sha256[:12]} "
            f"has {content.size}"
        )
    return tvm.runtime.tensor(content, device)._create_view(spec.tensor.shape, spec.tensor.dtype)


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:1000]
