"""Compiles ``cuda_streams.c``, the stand-in for CUDA's runtime."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import tvm

from tvm_split.rpc_runtime.program.program import TensorSpec

SOURCE = Path(__file__).with_name("cuda_streams.c")


def compiled(folder: Path, *options: str) -> Path:
    library = folder / "libcudart.so.13"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-pthread", *options, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return library


def on_host(spec: TensorSpec) -> Any:
    """The stand-in's memory of a device."""
    return tvm.runtime.empty(spec.shape, spec.dtype)
