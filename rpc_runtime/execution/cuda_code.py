"""CUDA kernels in the library of a stage: machine code, that a worker loads without a compiler.

Where TVM 0.27 compiles without a GPU, a library has a string, which is the source of its kernels, and whoever loads it
is asked, by a function that is registered, for the code of that string. So the string is the code, packed as text, and
the worker's function unpacks it. Where there was no compiler, it is the source, and a worker that has one compiles it.
"""

from __future__ import annotations

import base64
import binascii

from rpc_runtime.execution.nvcc import NvccError, fatbin, find_nvcc

PACKED, SOURCE = "// tvm-split: fatbin ", "// tvm-split: source "
"""How the string begins; the architecture follows, to the end of the line."""
CALLBACK = "tvm_callback_cuda_compile"


def packed(binary: bytes, arch: str) -> str:
    """Code for GPUs of ``arch``, as text."""
    return f"{PACKED}{arch}\n{base64.b64encode(binary).decode()}"


def marked(source: str, arch: str) -> str:
    """Source that is to be compiled for ``arch`` where it is loaded."""
    return f"{SOURCE}{arch}\n{source}"


def binary_of(code: str) -> bytes:
    """The code of `packed`, or what this machine's compiler makes of a source that is `marked`.

    Raises:
        NvccError: it is source, and there is no compiler here, or it does not take it.
        ValueError: it is neither.
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
    """From now on TVM's runtime in this process loads libraries with such strings."""
    import tvm_ffi

    tvm_ffi.register_global_func(CALLBACK, binary_of, override=True)
