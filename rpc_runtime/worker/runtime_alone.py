"""Imports TVM's runtime without the rest of its package, in less than half the time of ``import tvm``.

``import tvm`` also loads the Python side of the compiler, even without the compiler's library. Each class that only
that library defines then raises an error inside TVM, and the first error of a process reads the debugging symbols of
all loaded libraries for a backtrace. So the packages that import the rest are registered without running them, and
modules for missing parts are replaced.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType

from rpc_runtime.execution.cuda_runtime import load_cuda

NOT_RUN = ("tvm", "tvm.rpc")
EXTRA_LIBRARY = "tvm_runtime_extra"
FROM_RUNTIME = ("Object", "cpu", "cuda")
"""Names of ``tvm.runtime`` that TVM and this project also use as attributes of ``tvm``."""


def load_runtime() -> None:
    """Make ``tvm`` only TVM's runtime, and hide torch, which TVM imports if it is installed.

    With a GPU driver, also load TVM's CUDA library, which the rest of its package otherwise does.

    Only for the project's own processes. Does nothing if TVM is imported already.
    """
    if "tvm" in sys.modules:
        return
    os.environ.update(TVM_USE_RUNTIME_LIB="1", TVM_FFI_DISABLE_TORCH_C_DLPACK="1")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    for name in NOT_RUN:
        spec = find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"there is no module {name!r}", name=name)
        sys.modules[name] = module_from_spec(spec)
    sys.modules["tvm.runtime.disco"] = None  # type: ignore[assignment]
    # TVM's script printer prints only compiler objects, but classes inherit from it.
    printer = sys.modules["tvm.runtime.script_printer"] = ModuleType("tvm.runtime.script_printer")
    printer.Scriptable = object  # type: ignore[attr-defined]
    import_module("tvm.base")
    import_module("tvm.error")
    runtime = import_module("tvm.runtime")
    for name in FROM_RUNTIME:
        setattr(sys.modules["tvm"], name, getattr(runtime, name))
    import_module("tvm.runtime.vm")
    from tvm.libinfo import package_lib_paths
    from tvm_ffi.libinfo import load_lib_ctypes

    # A separate library with functions that kernels call (sorting) and tuners use (random numbers).
    load_lib_ctypes("tvm", EXTRA_LIBRARY, "RTLD_GLOBAL", extra_lib_paths=package_lib_paths())
    load_cuda()
