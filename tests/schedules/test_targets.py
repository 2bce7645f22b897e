"""Other processors than this one: AVX2 runs here, NEON and CUDA are built without their hardware."""

import shutil

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.target import Target
from tvm.target.codegen import target_has_features

import schedules
from tests.helpers.schedules.schedule_harness import HOST, assert_close, graph_of, lower, normal, run

X86_V3 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2})
AARCH64 = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"], "num-cores": 2})


def network(builder, x):
    for seed, (outputs, inputs, kernel, groups) in enumerate([(24, 3, 3, 1), (24, 1, 3, 24), (40, 24, 1, 1)]):
        weight = normal(seed, outputs, inputs, kernel, kernel) / (inputs * kernel)
        padding = (kernel // 2, kernel // 2)
        x = builder.emit(relax.op.nn.conv2d(x, relax.const(weight), padding=padding, groups=groups))
        x = builder.emit(relax.op.nn.relu(x))
    x = builder.emit(relax.op.nn.max_pool2d(x, (2, 2), (2, 2)))
    x = builder.emit(relax.op.mean(x, [2, 3]))
    x = builder.emit(relax.op.matmul(x, relax.const(normal(9, 40, 19))))
    return builder.emit(relax.op.nn.softmax(x, -1))


def attention(builder, x):
    keys = builder.emit(relax.op.permute_dims(x, [0, 2, 1]))
    scores = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(x, keys)), -1))
    mixed = builder.emit(relax.op.matmul(scores, x))
    gamma, beta = relax.const(np.ones(64, "float32")), relax.const(np.zeros(64, "float32"))
    mixed = builder.emit(relax.op.nn.layer_norm(mixed, gamma, beta, axes=[-1]))
    return builder.emit(relax.op.nn.gelu(builder.emit(relax.op.matmul(mixed, relax.const(normal(1, 64, 128))))))


INPUTS = {network: normal(0, 1, 3, 14, 14), attention: normal(0, 2, 12, 64)}
GRAPHS = pytest.mark.parametrize("graph", [network, attention])


@GRAPHS
@pytest.mark.skipif(not target_has_features("avx2", HOST), reason="runs AVX2 code")
def test_avx2_code_runs_and_agrees(graph):
    x = INPUTS[graph]
    lowered = lower(graph_of(graph, [x]), X86_V3)
    assert "fallback" not in schedules.chosen_rules(lowered).values()
    reference = run(lower(graph_of(graph, [x]), HOST), [x])
    assert_close(run(lowered, [x], X86_V3), reference.astype("float64"))


@GRAPHS
def test_aarch64_builds_an_object(graph, tmp_path):
    lowered = lower(graph_of(graph, [INPUTS[graph]]), AARCH64)
    executable = tvm.compile(lowered, target=AARCH64)
    path = tmp_path / "stage.o"
    executable.mod.export_library(str(path), fcompile=_keep_object)
    # e_machine of the ELF header: 183 is AArch64.
    assert int.from_bytes(path.read_bytes()[18:20], "little") == 183


def _keep_object(path, objects, options=None, **_):
    shutil.copyfile(objects[-1], path)


@pytest.mark.skipif(not target_has_features("avx512f", HOST), reason="shows AVX-512 code")
def test_wide_registers_are_used():
    lowered = lower(graph_of(attention, [INPUTS[attention]]), Target({"kind": "llvm", "mcpu": "x86-64-v4"}))
    kernels = tvm.IRModule(
        {name: function for name, function in lowered.functions_items() if isinstance(function, tirx.PrimFunc)}
    )
    kernels = relax.transform.AttachGlobalSymbol()(kernels)
    assembly = tvm.compile(kernels, target=Target({"kind": "llvm", "mcpu": "x86-64-v4"})).mod.inspect_source("asm")
    multiply_adds = [line for line in assembly.splitlines() if "vfmadd" in line and "ps" in line.split()[0]]
    assert sum("zmm" in line for line in multiply_adds) > sum("ymm" in line for line in multiply_adds)
