"""What this machine can do at most, measured: multiply-adds a second and bytes read a second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from tvm_split.compiler.blobs import BlobFolder
from tvm_split.compiler.build import build_module
from tvm_split.compiler.placement import tvm_target
from tvm_split.compiler.targets import host_target
from tvm_split.rpc_runtime.execution.in_process import InProcessPipeline
from tvm_split.rpc_runtime.program.program import Program, StageSpec, TensorSpec
from tvm_split.rpc_runtime.scratch import ScratchFolder
from tvm_split.schedules.ceilings import CeilingKernel, memory_read_kernel, multiply_add_kernel

ROUNDS = 7


@dataclass(frozen=True)
class Ceilings:
    """Of float32 operations (a multiplication and an addition are two) and of reading memory, with ``threads``."""

    threads: int
    operations_per_second: float
    bytes_per_second: float


def measure_ceilings(threads: int, rounds: int = ROUNDS) -> Ceilings:
    """The best of ``rounds`` runs of each ceiling's kernel, since whatever disturbs a run makes it slower."""
    target = tvm_target(host_target(threads))
    return Ceilings(
        threads,
        _best_rate(multiply_add_kernel(target, threads), threads, rounds),
        _best_rate(memory_read_kernel(target, threads), threads, rounds),
    )


def _best_rate(kernel: CeilingKernel, threads: int, rounds: int) -> float:
    program, blobs = _program(kernel, threads)
    inputs = [np.full(kernel.input_shape, 0.5, np.float32)]
    best = float("inf")
    with InProcessPipeline(program, blobs.path, threads, on_calling_thread=False) as pipeline:
        before = 0.0
        for _ in range(rounds):
            pipeline.run(inputs)
            (stage,) = pipeline.statistics()
            best = min(best, stage.compute_seconds - before)
            before = stage.compute_seconds
    return kernel.amount / best


def _program(kernel: CeilingKernel, threads: int) -> tuple[Program, BlobFolder]:
    """The kernel as a program of one stage, which any machine can run."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(kernel.input_shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            function = builder.add_func(kernel.function, "ceiling")
            call = relax.call_tir(function, (x,), relax.TensorType(kernel.output_shape, "float32"))
            result = builder.emit_output(relax.Tuple([builder.emit(call)]))
        builder.emit_func_output(result)
    blobs = BlobFolder.temporary()
    with ScratchFolder("build") as folder:
        built = build_module(builder.get(), host_target(threads), folder.path / "ceiling.so", "ceiling")
        stage = StageSpec(
            index=0,
            name="ceiling",
            machine="here",
            layers=(),
            device="cpu",
            library=blobs.add_file(built.library),
            weights=(),
            inputs=(TensorSpec("x", kernel.input_shape, "float32"),),
            outputs=(TensorSpec("sums", kernel.output_shape, "float32"),),
        )
    return Program(stage.inputs, stage.outputs, (stage,)), blobs
