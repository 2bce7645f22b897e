"""Builds a Relax graph the way tvm_split.compile does, and runs it on this machine."""

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.target import Target
from tvm_ffi import structural_walk

import schedules
from tvm_split.compiler.stage import code_of
from tvm_split.compiler.targets import host_target

_HOST = host_target(2)
HOST = Target(_HOST)
QUICK_HOST = Target({**_HOST, "opt-level": 0})
"""The same for schedules; LLVM makes of them what is compiled fastest."""
Graph = Callable[..., relax.Expr]


def graph_of(graph: Graph, inputs: Sequence[np.ndarray | relax.Var]) -> tvm.IRModule:
    """A module whose ``main`` is ``graph(builder, *variables)``, with variables like the inputs."""
    builder = relax.BlockBuilder()
    variables = [
        value
        if isinstance(value, relax.Var)
        else relax.Var(f"input_{number}", relax.TensorType(value.shape, str(value.dtype)))
        for number, value in enumerate(inputs)
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(graph(builder, *variables))
        builder.emit_func_output(result)
    return builder.get()


def lower(module: tvm.IRModule, target: Target, database: schedules.TunedKernels | None = None) -> tvm.IRModule:
    """All passes up to scheduled kernels."""
    with target:
        return schedules.apply(fuse(module, target), target, database)


def unscheduled(module: tvm.IRModule, target: Target) -> list[tirx.PrimFunc]:
    """The kernels before they are scheduled, as tuning sees them."""
    functions = [
        function for _, function in fuse(module, target).functions_items() if isinstance(function, tirx.PrimFunc)
    ]
    return [function.without_attr("global_symbol") for function in functions]


def fuse(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """All passes before scheduling."""
    transform = relax.transform
    passes = [
        transform.FoldBatchnormToConv2D(),
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        transform.FoldConstant(),
        *schedules.layout_passes(target),
        transform.LegalizeOps(dict(schedules.legalizations(target))),
        transform.AnnotateTIROpPattern(),
        transform.FoldConstant(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(["main"]),
    ]
    with target:
        for step in passes:
            module = step(module)
    return module


def run(lowered: tvm.IRModule, inputs: Sequence[np.ndarray], target: Target = QUICK_HOST) -> np.ndarray:
    machine = relax.VirtualMachine(code_of(lowered, target), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(array) for array in inputs))
    return result.numpy()


def nodes(lowered: tvm.IRModule, kind: type = tvm.runtime.Object) -> list[tvm.runtime.Object]:
    """The nodes of a kind in the kernels, each as often as it is written."""
    matches: list[tvm.runtime.Object] = []
    for _, function in lowered.functions_items():
        if isinstance(function, tirx.PrimFunc):
            structural_walk(function.body, (kind, matches.append))
    return matches


def rules(lowered: tvm.IRModule) -> set[str]:
    return set(schedules.chosen_rules(lowered).values())


def evaluate(graph: Graph, inputs: Sequence[np.ndarray], target: Target = HOST) -> tuple[np.ndarray, set[str]]:
    """The graph's result, and which rules scheduled its kernels."""
    lowered = lower(graph_of(graph, inputs), target)
    return run(lowered, inputs, QUICK_HOST if target is HOST else target), rules(lowered)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    """Errors relative to the largest expected value."""
    assert actual.shape == expected.shape
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-6)
    worst = float(np.abs(actual.astype("float64") - expected).max(initial=0.0))
    assert worst <= tolerance * scale, f"error {worst} where values reach {scale}"


def normal(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
