"""CUDA kernels in the library of a stage: machine code that a worker loads without a compiler.

If TVM 0.27 compiles without a GPU, the library contains the source of its kernels as a string. When the library is
loaded, a registered function must return the machine code for that string. Here the string is the machine code itself,
packed as text, and the worker's function unpacks it. If the compiling machine had no nvcc, the string is the source,
and the worker compiles it if it has nvcc.
"""

from __future__ import annotations

import base64
import binascii

from rpc_runtime.execution.nvcc import NvccError, fatbin, find_nvcc

PACKED, SOURCE = "// tvm-split: fatbin ", "// tvm-split: source "
"""Prefixes of the string; the architecture follows up to the end of the line."""
CALLBACK = "tvm_callback_cuda_compile"


def packed(binary: bytes, arch: str) -> str:
    """Return machine code for GPUs of ``arch`` as text."""
    return f"{PACKED}{arch}\n{base64.b64encode(binary).decode()}"


def marked(source: str, arch: str) -> str:
    """Return source as text that the loading machine compiles for ``arch``."""
    return f"{SOURCE}{arch}\n{source}"


def binary_of(code: str) -> bytes:
    """Return the machine code in the output of `packed`, or compile the source in the output of `marked`.

    Raises:
        NvccError: ``code`` is source, and this machine has no nvcc, or nvcc rejects the source.
        ValueError: ``code`` is neither, or is damaged.
    """
    head, _, rest = code.partition("\n")
    if head.startswith(PACKED):
        try:
            return base64.b64decode(rest, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the CUDA code of this library is damaged: {error}") from error
    if not head.startswith(SOURCE):
        raise ValueError("this library has CUDA code in a form that is not known here: compile again")
    if find_nvcc() is None:
        raise NvccError(
            "its CUDA kernels are source, since they were compiled where there was no nvcc, and there is none here: "
            "compile again where there is one"
        )
    return fatbin(rest, head.removeprefix(SOURCE))


def register_loader() -> None:
    """Register `binary_of`, by which TVM's runtime in this process loads such libraries."""
    import tvm_ffi

    tvm_ffi.register_global_func(CALLBACK, binary_of, override=True)
