"""Compiles kernels for the process that started it: ``python -m tvm_split.compiler.kernel_process SOCKET TARGET``."""

import contextlib
import json
import os
import sys
from multiprocessing.connection import Connection

# TVM imports torch if it is installed, which takes twice as long as TVM itself.
os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
sys.modules["torch"] = None  # type: ignore[assignment]

import tvm  # noqa: E402

from tvm_split.compiler.kernel_processes import compiled_object  # noqa: E402
from tvm_split.compiler.targets import tvm_target  # noqa: E402

target, starter = tvm_target(json.loads(sys.argv[2])), Connection(int(sys.argv[1]))
with contextlib.suppress(EOFError, OSError):  # the process that started this one has ended
    while True:
        starter.send_bytes(compiled_object(tvm.ir.load_json(starter.recv_bytes().decode()), target))
