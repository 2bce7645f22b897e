"""Compiles CUDA source for this machine's CPU, with `emulated_cuda.h`. Imports no TVM: it stands in for nvcc, too."""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tvm_split.rpc_runtime.execution.nvcc import find_nvcc

COMPILE_SECONDS = 600
_HEADER = Path(__file__).with_name("emulated_cuda.h")
_OPTIONS = ("-x", "c++", "-std=c++17", "-O1", "-Xcompiler", "-fPIC,-w")


@cache
def read_header(nvcc: str) -> Path:
    """`emulated_cuda.h` as the compiler has read it: to read it takes half of what a library takes, and twice its own.

    It goes with this process.
    """
    folder = TemporaryDirectory(prefix="emulated-cuda-")
    atexit.register(folder.cleanup)
    header = Path(folder.name) / _HEADER.name
    header.write_text(f'#include "{_HEADER}"\n')
    _compile(nvcc, header, Path(f"{header}.gch"), "-c", "-Xcompiler", "-x,c++-header")
    return header


def emulated_library(
    source: str, names: Iterable[str], folder: Path, nvcc: str | None = None, header: Path = _HEADER
) -> Path:
    """A library with ``launch_NAME`` and ``parameters_NAME``, how many it has, of each kernel of a source.

    ``header`` is what `read_header` gives where many are made.

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
    path.write_text(f'#include "{header}"\n{source}\n{launchers}')
    _compile(nvcc or str(find_nvcc()), path, library, "-shared")
    return library


def _compile(nvcc: str, source: Path, output: Path, *options: str) -> None:
    command = [nvcc, *_OPTIONS, *options, "-o", str(output), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"the kernels are no C++ with {_HEADER.name}: {made.stderr}")
