"""Compiles CUDA source for this machine's CPU, with `emulated_cuda.h`. Imports no TVM: it stands in for nvcc, too."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tvm_split.rpc_runtime.execution.nvcc import find_nvcc

COMPILE_SECONDS = 600
_HEADER = Path(__file__).with_name("emulated_cuda.h")


def emulated_library(source: str, names: Iterable[str], folder: Path, nvcc: str | None = None) -> Path:
    """A library with ``launch_NAME`` and ``parameters_NAME``, how many it has, of each kernel of a source.

    Raises:
        RuntimeError: the source is no C++, also with what stands in for CUDA.
    """
    launchers = "".join(
        f'extern "C" const char* launch_{name}(void** values, const int* extents, int backwards) {{ '
        f"return emulated::launch({name}, values, extents, backwards); }}\n"
        f'extern "C" const int parameters_{name} = emulated::parameters({name});\n'
        for name in names
    )
    path, library = folder / "kernels.cpp", folder / "kernels.so"
    path.write_text(f'#include "{_HEADER}"\n{source}\n{launchers}')
    compiler = nvcc or str(find_nvcc())
    command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-shared", "-Xcompiler", "-fPIC,-w", "-o"]
    made = subprocess.run(
        [*command, str(library), str(path)], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
    )
    if made.returncode != 0:
        raise RuntimeError(f"the kernels are no C++ with {_HEADER.name}: {made.stderr}")
    return library
