"""Of each package that a worker imports, the files that it needs there: pure rules on names of files."""

from __future__ import annotations

import re
from collections.abc import Sequence

TVM_RUNTIME = "libtvm_runtime.so", "libtvm_runtime_extra.so"
"""The second one serves tuning (`rpc_runtime.worker.tuning_process`)."""
TVM_CUDA_RUNTIME = "libtvm_runtime_cuda.so"
CUDA_RUNTIME = "libcudart.so"

_LICENCE = r"[^/]+\.dist-info/(METADATA|licenses/.*|LICEN[SC]E.*|NOTICE.*)"
_NOBODYS = r"(^|/)(tests?|testing|include)/|\.(pyi|pxd|pyx|pxi|h|hpp|a|pyc|typed)$"
"""What only those read who compile or test the package."""

_ONLY: dict[str, Sequence[str]] = {
    # What `runtime_alone` imports, and the packages around it, which it enters without running them.
    "apache-tvm": (
        r"tvm/(__init__|_version|base|error|libinfo)\.py",
        r"tvm/(runtime|rpc)/.*\.py",
        r"tvm/support/(__init__|libinfo|utils)\.py",
        r"tvm/(LICENSE|NOTICE|licenses/.*)",
    ),
    "nvidia-cuda-runtime": (rf"nvidia/cu\d+/lib/{re.escape(CUDA_RUNTIME)}\.\d+",),
}
_NOT: dict[str, Sequence[str]] = {
    "apache-tvm-ffi": (r"tvm_ffi/(3rdparty|cython|share|src|stub)/.*",),
    "numpy": (r"numpy/(doc|f2py|typing|_pyinstaller)/.*", r"numpy/_core/_(\w+_tests|simd)\..*"),
    "zstandard": (r"zstandard/_cffi\..*",),  # it is used by interpreters other than CPython
}


def is_needed(package: str, name: str, device: str) -> bool:
    """Whether a worker for a device (``"cpu"`` or ``"cuda"``) needs a file of a package.

    ``name`` is relative to the folder of all packages, with slashes, as in a wheel.
    """
    if name.startswith("../") or ".data/" in name:
        return False
    if ".dist-info/" in name:
        return re.fullmatch(_LICENCE, name) is not None
    if package == "apache-tvm" and name.startswith("tvm/lib/"):
        libraries = (*TVM_RUNTIME, TVM_CUDA_RUNTIME) if device == "cuda" else TVM_RUNTIME
        return name.removeprefix("tvm/lib/") in libraries
    if package in _ONLY:
        return any(re.fullmatch(pattern, name) for pattern in _ONLY[package])
    if re.search(_NOBODYS, name):
        return False
    return not any(re.fullmatch(pattern, name) for pattern in _NOT.get(package, ()))


def place_of(package: str, name: str) -> str:
    """Where a file lies in the kit's folder of packages: as in a wheel, and CUDA's library where TVM's finds it."""
    if package == "nvidia-cuda-runtime" and name.startswith("nvidia/"):
        return f"tvm/lib/{name.rpartition('/')[2]}"
    return name
