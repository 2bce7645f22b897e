"""Compiles kernels of a folder next to the process that started it: ``python -m tvm_split.compiler.kernel_process``."""

import os
import sys
from pathlib import Path

# TVM imports torch if it is installed, which takes twice as long as TVM itself.
os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
sys.modules["torch"] = None  # type: ignore[assignment]

from tvm_split.compiler.kernel_processes import compile_waiting  # noqa: E402


def end_without_parent(done: int) -> None:
    """End this process if the one that started it was killed, and therefore could not end it."""
    if os.getppid() != int(sys.argv[3]):
        sys.exit()


compile_waiting(Path(sys.argv[1]), float(sys.argv[2]), end_without_parent)
