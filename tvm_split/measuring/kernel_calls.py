"""What a scheduled stage calls: its kernels with their operands, weights and consumers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from relay_passes.contract import bindings_of, main_function, used_variables
from relay_passes.lift_weights import LARGEST_EMBEDDED_BYTES
from relay_passes.rewrite import is_tensor_constant, operator_name
from rpc_runtime.program.program import TensorSpec
from schedules.blocks import without_symbol
from tvm_split.compiler.describe import shape_of, size_bytes, tensors_in
from tvm_split.compiler.kernels import Kernel


@dataclass(frozen=True)
class Weight:
    """Prepacked weights by where they lie in this process: what several kernels share has the same ``address``."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel in a scheduled stage.

    ``arguments`` are operands, then ``results`` results; ``weight_positions`` says which of them are weights, and
    ``weights`` what these are, without those so small that they stay in the code. ``consumers`` are the positions of
    the calls that read a result, seen through views. ``digest`` is equal for equal kernels, of whatever name or model.
    """

    kernel: Kernel
    digest: str
    arguments: tuple[TensorSpec, ...]
    weight_positions: frozenset[int]
    results: int
    weights: tuple[Weight, ...]
    consumers: tuple[int, ...]

    @property
    def activation_bytes(self) -> int:
        """Operands and results, without weights."""
        return sum(each.size_bytes for i, each in enumerate(self.arguments) if i not in self.weight_positions)


def kernel_calls(module: tvm.IRModule, kernels: tuple[Kernel, ...]) -> tuple[KernelCall, ...]:
    """The calls in a module after the phase ``schedule``, for its ``kernels`` as `kernels_of` gives them."""
    digests: dict[str, str] = {}
    made_by: dict[str, frozenset[int]] = {}
    consumers: list[set[int]] = [set() for _ in kernels]
    found: list[tuple[Kernel, relax.Call]] = []
    for binding in bindings_of(main_function(module)):
        sources: frozenset[int] = frozenset().union(
            *(made_by.get(used.name, frozenset()) for used in used_variables(binding.value))
        )
        if operator_name(binding.value) == "relax.call_tir":
            position = len(found)
            for source in sources:
                consumers[source].add(position)
            found.append((kernels[position], binding.value))
            sources = frozenset({position})
        made_by[binding.var.name] = sources
    for kernel, _ in found:
        if kernel.function not in digests:
            digests[kernel.function] = kernel_digest(module[kernel.function])
    return tuple(
        _kernel_call(kernel, call, digests[kernel.function], tuple(sorted(after)))
        for (kernel, call), after in zip(found, consumers, strict=True)
    )


def kernel_digest(function: tirx.PrimFunc) -> str:
    """The SHA-256 of a kernel's code, whatever its name."""
    return hashlib.sha256(without_symbol(function).script(show_meta=True).encode()).hexdigest()


def is_safe_to_time(function: tirx.PrimFunc) -> bool:
    """Whether a kernel surely ends, and does not fail, on made-up values where integers are zero.

    It does not where it divides by an integer that it reads, or loops as long as what it reads says.
    """
    dangers: list[object] = []

    def visit_division(node: Any) -> None:
        if not str(node.ty).startswith("float") and _occurs(tvm.ir.TensorLoad, node.b):
            dangers.append(node)

    divisions = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
    tvm_ffi.structural_walk(function.body, [(tirx.While, dangers.append), (divisions, visit_division)])
    return not dangers


def _occurs(kind: type, expression: object) -> bool:
    found: list[object] = []
    tvm_ffi.structural_walk(expression, [(kind, found.append)])
    return bool(found)


def _kernel_call(kernel: Kernel, call: relax.Call, digest: str, consumers: tuple[int, ...]) -> KernelCall:
    operands = list(call.args[1].fields)
    results = tensors_in(call.ty)
    constants = [i for i, each in enumerate(operands) if is_tensor_constant(each)]
    weights = {
        Weight(operands[i].value.data_ptr(), size_bytes(operands[i].ty))
        for i in constants
        if size_bytes(operands[i].ty) > LARGEST_EMBEDDED_BYTES
    }
    types = [*(tensor for each in operands for tensor in tensors_in(each.ty)), *results]
    return KernelCall(
        kernel=kernel,
        digest=digest,
        arguments=tuple(TensorSpec("", shape_of(each), str(each.dtype)) for each in types),
        weight_positions=frozenset(constants),
        results=len(results),
        weights=tuple(sorted(weights, key=lambda weight: weight.address)),
        consumers=consumers,
    )


def shared_weight_bytes(calls: tuple[KernelCall, ...] | list[KernelCall]) -> int:
    """The bytes of all weights of some calls, each once."""
    return sum(weight.size_bytes for weight in {weight for call in calls for weight in call.weights})
