from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_split.compiler.build import build_module
from tvm_split.compiler.targets import host_target
from tvm_split.errors import CompileError


def test_what_tvm_cannot_compile_is_named_in_one_line(tmp_path: Path) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([3, 4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            scale = relax.const(np.ones((3, 4), np.float32), "float32")
            # TVM has no root mean square over all axes.
            norm = builder.emit(relax.op.nn.rms_norm(x, scale, [0, 1]))
            result = builder.emit_output(relax.Tuple([norm]))
        builder.emit_func_output(result)
    module: tvm.IRModule = builder.get()
    with pytest.raises(CompileError, match=r"^part_7 cannot be compiled for \{.*\}: .*dimension mismatch.*$") as raised:
        build_module(module, host_target(1), tmp_path / "part.so", "part_7")
    assert "\n" not in str(raised.value)


def test_only_main_checks_what_it_is_given(tmp_path: Path) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([3, 4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.Tuple([builder.emit(relax.op.exp(x))]))
        builder.emit_func_output(result)
    built = build_module(builder.get(), host_target(1), tmp_path / "part.so", "part")
    assert b"to be compact" not in built.library.read_bytes()  # which kernels otherwise say of their arguments
    main = relax.VirtualMachine(tvm.runtime.load_module(str(built.library)), tvm.cpu())["main"]
    (right,) = main(tvm.runtime.tensor(np.ones((3, 4), np.float32)))
    np.testing.assert_allclose(right.numpy(), np.full((3, 4), np.e), rtol=1e-5)
    for wrong in (np.ones((3, 5), np.float32), np.ones(12, np.float32), np.ones((3, 4), np.float64)):
        with pytest.raises((RuntimeError, ValueError), match=r"fn=main, loc=param\[0\], param=x"):
            main(tvm.runtime.tensor(wrong))
