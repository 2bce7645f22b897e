"""TVM's runtime without the rest of its package: what a worker needs starts in less than half the time.

``import tvm`` loads the Python side of the compiler as well, also where the compiler's library is left out. Every class
of it that only that library knows is an error inside of TVM, and the first error of a process reads the debugging
symbols of all that is loaded, for the sake of a backtrace. So the packages that would import the rest are entered
without being run, and the modules that describe what there is not are left out.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType

from rpc_runtime.execution.cuda_runtime import load_cuda

NOT_RUN = ("tvm", "tvm.rpc")
EXTRA_LIBRARY = "tvm_runtime_extra"
FROM_RUNTIME = ("Object", "cpu", "cuda")
"""Names of ``tvm.runtime`` that it, and we, know as ``tvm``'s."""


def load_runtime() -> None:
    """From now on ``tvm`` is TVM's runtime alone, and torch, which TVM imports where it finds it, is not there.

    With a driver for GPUs, TVM's library for them is loaded too, which otherwise the rest of its package would do.

    For a process of our own that has not imported TVM; in another one nothing is changed.
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
    sys.modules["tvm.runtime.script_printer"] = _without_printer()
    import_module("tvm.base")
    import_module("tvm.error")
    runtime = import_module("tvm.runtime")
    for name in FROM_RUNTIME:
        setattr(sys.modules["tvm"], name, getattr(runtime, name))
    import_module("tvm.runtime.vm")
    _load_extra()
    load_cuda()


def _load_extra() -> None:
    """What kernels call that is in a library of its own: sorting, and the random numbers that tuners ask for."""
    from tvm.libinfo import package_lib_paths
    from tvm_ffi.libinfo import load_lib_ctypes

    load_lib_ctypes("tvm", EXTRA_LIBRARY, "RTLD_GLOBAL", extra_lib_paths=package_lib_paths())


def _without_printer() -> ModuleType:
    """Scripts are of what the compiler makes; its classes only want something to inherit from."""
    module = ModuleType("tvm.runtime.script_printer")
    module.Scriptable = object  # type: ignore[attr-defined]
    return module
