from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes.ir import new_function
from tests.helpers.full_disk import full_disk
from tvm_split.compiler.stage import StageCompiler
from tvm_split.compiler.targets import host_target
from tvm_split.errors import CompileError


def build(operator: Callable[[relax.Var], relax.Expr], library: Path) -> None:
    x = relax.Var("x", relax.TensorType([3, 4], "float32"))
    function = new_function("part_7", [x], lambda builder: [builder.emit(operator(x))])
    compiler = StageCompiler(host_target(1))
    compiler.build(compiler.lower(function)["schedule"], library, "part_7")


def test_what_tvm_cannot_compile_is_named_in_one_line(tmp_path: Path) -> None:
    scale = relax.const(np.ones((3, 4), np.float32), "float32")
    with pytest.raises(CompileError, match=r"^part_7 cannot be compiled for \{.*\}: .*dimension mismatch.*$") as raised:
        # TVM has no root mean square over all axes.
        build(lambda x: relax.op.nn.rms_norm(x, scale, [0, 1]), tmp_path / "part.so")
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


def test_what_the_linker_says_is_kept(tmp_path: Path) -> None:
    (tmp_path / "part.so").symlink_to("/dev/full")  # object files need no room on a disk, but the library does
    with pytest.raises(CompileError, match=rf"^linking part_7 in {tmp_path} .*No space left on device") as raised:
        build(relax.op.exp, tmp_path / "part.so")
    assert "\n" not in str(raised.value)
