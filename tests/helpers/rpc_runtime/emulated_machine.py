"""A machine with a GPU, without one: CUDA's runtime and driver by `cuda_machine.c`, nvcc by what compiles for the CPU.

All else is real: TVM's library for GPUs, its machine, and a worker's process. A stage must be compiled without nvcc, so
that its library has source, which this machine's own nvcc compiles.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.schedules.emulated_library import emulated_library
from tvm_split.rpc_runtime.execution.nvcc import find_nvcc

SOURCE = Path(__file__).with_name("cuda_machine.c")
ARCH = "sm_80"
_KERNEL = re.compile(r"__global__ void __launch_bounds__\(\d+\) (\w+)\(")


def emulated_machine(folder: Path) -> dict[str, str]:
    """The environment of a process on such a machine. Needs CUDA's toolkit (`gpu_driver.require_toolkit`)."""
    nvcc = find_nvcc()
    assert nvcc is not None
    include = next(
        place / "include"
        for place in (nvcc.resolve().parents[1], Path("/usr/local/cuda"))
        if (place / "include/cuda.h").is_file()
    )
    versions = folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };")
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", f"-I{include}", str(SOURCE), "-ldl"]
    options = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}", "-o", str(folder / "libcudart.so.13")]
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=100)
    driver = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*driver, f"-L{folder}", "-l:libcudart.so.13"], check=True, capture_output=True, timeout=100)
    script = folder / "nvcc"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m {__name__} {nvcc} {folder} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"LD_LIBRARY_PATH": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}


def main(nvcc: str, folder: str, *options: str) -> None:
    """As nvcc: ``--version``, or compiles the last option, and writes where that is to what ``-o`` says."""
    if options == ("--version",):
        print("Cuda compilation tools, release 13.0, V13.0.0")
        return
    source = Path(options[-1]).read_text()
    library = Path(folder) / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with TemporaryDirectory(dir=folder) as scratch:
            emulated_library(source, dict.fromkeys(_KERNEL.findall(source)), Path(scratch), nvcc).rename(library)
    Path(options[options.index("-o") + 1]).write_bytes(str(library).encode() + b"\0")


if __name__ == "__main__":
    main(*sys.argv[1:])
