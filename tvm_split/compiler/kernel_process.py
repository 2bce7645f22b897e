"""Compiles kernels of a folder next to the process that started it: ``python -m tvm_split.compiler.kernel_process``."""

import os
import sys
from pathlib import Path

# TVM imports torch if it is installed, which takes twice as long as TVM itself.
os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
sys.modules["torch"] = None  # type: ignore[assignment]

from tvm_split.compiler.kernel_processes import compile_waiting  # noqa: E402

compile_waiting(Path(sys.argv[1]), float(sys.argv[2]))
