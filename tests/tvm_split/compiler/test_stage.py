import errno
import itertools
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import relax, tirx

import tvm_split
from relay_passes.costs import calls
from relay_passes.ir import new_function
from tests.helpers.full_disk import full_disk
from tests.models import torch_models
from tests.models.unet import unet
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import host_target
from tvm_split.errors import CompileError, OutputError

TENSOR = relax.TensorType([3, 4], "float32")


def build(operator: Callable[[relax.Var], relax.Expr], library: Path, tensor: relax.Type = TENSOR) -> None:
    x = relax.Var("x", tensor)
    function = new_function("part_7", [x], lambda builder: [builder.emit(operator(x))])
    compiler = StageCompiler(host_target(1))
    compiler.build(compiler.lower(function)["name"], library, "part_7")


def test_what_tvm_cannot_compile_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"^part_7 cannot be compiled for \{.*\}: .*integer divisions.*$") as raised:
        # TVM's attention divides as floats do.
        build(lambda x: relax.op.nn.attention(x, x, x), tmp_path / "part.so", relax.TensorType([1, 2, 3, 4], "int8"))
    assert "\n" not in str(raised.value)


def test_only_main_checks_its_arguments(tmp_path: Path) -> None:
    build(relax.op.exp, tmp_path / "part.so")
    assert b"to be compact" not in (tmp_path / "part.so").read_bytes()  # which kernels otherwise say of their arguments
    main = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "part.so")), tvm.cpu())["main"]
    (right,) = main(tvm.runtime.tensor(np.ones((3, 4), np.float32)))
    np.testing.assert_allclose(right.numpy(), np.full((3, 4), np.e), rtol=1e-5)
    for wrong in (np.ones((3, 5), np.float32), np.ones(12, np.float32), np.ones((3, 4), np.float64)):
        with pytest.raises((RuntimeError, ValueError), match=r"fn=main, loc=param\[0\], param=x"):
            main(tvm.runtime.tensor(wrong))


def test_a_limit_of_files_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    with full_disk(4096), pytest.raises(CompileError, match=r"part_7 .* files are limited to 4.1 kB"):
        build(relax.op.exp, tmp_path / "part.so")


def test_a_full_disk_of_temporary_files_is_named(tmp_path: Path) -> None:
    def fill_disk() -> dict[str, tirx.PrimFunc]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match=f"^{tempfile.gettempdir()} .*No space left on device; make room there"):
        StageCompiler(host_target(1)).build_kernels(["kernel"], fill_disk, tmp_path / "part.so", "part_7")


def test_what_the_linker_says_is_kept(tmp_path: Path) -> None:
    (tmp_path / "part.so").symlink_to("/dev/full")  # object files need no room on a disk, but the library does
    with pytest.raises(CompileError, match=rf"^linking part_7 in {tmp_path} .*No space left on device") as raised:
        build(relax.op.exp, tmp_path / "part.so")
    assert "\n" not in str(raised.value)


MODELS = {
    "resnet": (torch_models.resnet, (torch.zeros(1, 3, 32, 32),)),
    "bert": (torch_models.bert, (torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16, dtype=torch.int64))),
    "unet": (lambda: unet()[0], unet()[1:]),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_work_is_lost_or_counted_twice(name: str) -> None:
    build, inputs = MODELS[name]
    model = tvm_split.load_model(build(), inputs)
    plan = tvm_split.plan(model, tvm_split.Cluster.in_process(1, threads=1))
    bundle = tvm_split.compile(model, plan, verify=name == "unet")
    kernels = [kernel for stage in bundle.kernels.values() for kernel in stage]
    defined = sum(work for _, work, _ in calls(model.module))
    # Folding and reading views in place take away some of what only maps or moves elements; the products stay.
    assert sum(kernel.operations for kernel in kernels) == pytest.approx(defined, rel=0.06)
    assert not any(kernel.is_slow for kernel in kernels)
    products = {kernel.layers[0] for kernel in kernels if kernel.rule in ("conv2d", "winograd", "matmul")}
    assert len(products) > 4
    assert products <= set(model.layer_names)


class Alike(nn.Module):
    """Layers that are named as other forms of a layer's tensor would be."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.gate_padded = nn.Conv2d(3, 17, 1, bias=False), nn.Conv2d(17, 32, 1, bias=False)
        self.gate_plain, self.last = nn.Softmax(1), nn.Conv2d(32, 16, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gate_plain(self.gate_padded(self.gate(x))))


def test_layers_are_told_apart_whatever_their_names() -> None:
    model = tvm_split.load_model(Alike().eval(), (torch.zeros(1, 3, 8, 8),))
    cluster = tvm_split.Cluster.in_process(2, threads=1)
    split = {"machine-a": ["gate", "gate_padded"], "machine-b": ["gate_plain", "last"]}
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split))
    kernels = [kernel for stage in bundle.kernels.values() for kernel in stage]
    assert {layer for kernel in kernels for layer in kernel.layers} == set(model.layer_names)
    products = [kernel for kernel in kernels if kernel.rule == "conv2d"]
    assert [kernel.layers for kernel in products] == [("gate",), ("gate_padded",), ("last",)]
    assert [kernel.operations for kernel in products] == [2 * 64 * 3 * 17, 2 * 64 * 17 * 32, 2 * 64 * 32 * 16]


class PreparedFirst(nn.Module):
    """Convolutions whose operands other kernels raise, pad or repeat first: over one axis, and in narrow groups."""

    def __init__(self) -> None:
        super().__init__()
        self.axis = nn.Conv1d(8, 32, 3, padding=1)
        self.padded = nn.Conv2d(17, 17, 3, groups=17)
        self.repeated = nn.Conv2d(6, 24, 3, groups=6)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.axis(x), self.padded(y), self.repeated(z)


def test_work_belongs_to_the_kernel_that_does_it() -> None:
    # No part of a vector, of any width, divides the last result's 27 columns: else plain loops would be chosen for it.
    inputs = torch.zeros(1, 8, 40), torch.zeros(1, 17, 30, 30), torch.zeros(1, 6, 30, 29)
    model = tvm_split.load_model(PreparedFirst().eval(), inputs)
    bundle = tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.in_process(1, threads=1)), verify=False)
    kernels = bundle.kernels["stage_0"]
    products = [kernel for kernel in kernels if kernel.rule in ("conv2d", "depthwise_conv2d")]
    assert {layer for kernel in products for layer in kernel.layers} == {"axis", "padded", "repeated"}
    for kernel in kernels:
        if kernel not in products:
            assert kernel.operations <= kernel.moved_bytes, kernel


LAYERS = 4


def repeated(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(module() for _ in range(LAYERS) for module in modules))


def test_layers_of_the_same_shapes_share_one_kernel() -> None:
    """Blocks of every family: dense, narrow groups, depthwise, a norm; then blocks over one axis."""
    images = repeated(
        partial(nn.Conv2d, 32, 32, 3, padding=1),
        nn.ReLU,
        partial(nn.Conv2d, 32, 32, 3, padding=1, groups=8),
        partial(nn.Conv2d, 32, 32, 3, padding=1, groups=32),
        partial(nn.GroupNorm, 4, 32),
    )
    lines = repeated(partial(nn.Conv1d, 32, 32, 3, padding=1), nn.GELU)
    last = repeated(partial(nn.Linear, 48, 48), partial(nn.LayerNorm, 48))
    network = nn.Sequential(images, nn.Flatten(2), lines, last).eval()
    model = tvm_split.load_model(network, (torch.zeros(1, 32, 6, 8),))
    (part,) = partition(model, tvm_split.plan(model, tvm_split.Cluster.in_process(1, threads=1))).computations
    functions = StageCompiler(host_target(1)).lower(part.function)["name"].functions_items()
    kernels = [kernel.without_attr("global_symbol") for _, kernel in functions if isinstance(kernel, tirx.PrimFunc)]
    assert len(kernels) > 6
    assert not any(tvm_ffi.structural_equal(*pair) for pair in itertools.combinations(kernels, 2))
