"""Choose, by file names alone, the files that a worker needs of each package that it imports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import rpc_runtime

TVM_RUNTIME = "libtvm_runtime.so", "libtvm_runtime_extra.so"
"""TVM's runtime libraries; the second one is for tuning (`rpc_runtime.worker.tuning_process`)."""
TVM_CUDA_RUNTIME = "libtvm_runtime_cuda.so"
CUDA_RUNTIME = "libcudart.so"

_LICENCE = r"[^/]+\.dist-info/(METADATA|licenses/.*|LICEN[SC]E.*|NOTICE.*)"
_NOBODYS = r"(^|/)(tests?|testing|include)/|\.(pyi|pxd|pyx|pxi|h|hpp|a|pyc|typed)$"
"""Files that are used only to compile or test a package."""

_ONLY: dict[str, Sequence[str]] = {
    # The modules that `runtime_alone` imports, and their parent packages, whose code it does not run.
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
    "zstandard": (r"zstandard/_cffi\..*",),  # only for interpreters other than CPython
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
    """Return a file's path in the kit's ``packages``: as in a wheel, but CUDA's library where TVM's finds it."""
    if package == "nvidia-cuda-runtime" and name.startswith("nvidia/"):
        return f"tvm/lib/{name.rpartition('/')[2]}"
    return name


def own_files() -> dict[str, Path]:
    """Return the worker's own files by their paths relative to the folder that it is imported from."""
    root = Path(rpc_runtime.__file__).parent.parent
    return {str(path.relative_to(root)): path for path in (root / "rpc_runtime").rglob("*.py")}
