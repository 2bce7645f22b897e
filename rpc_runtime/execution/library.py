"""Load shared libraries from sealed memory, so that the loaded bytes are the verified bytes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import platform
from collections.abc import Iterator
from typing import Any

import tvm_ffi

from rpc_runtime.errors import WorkerError
from rpc_runtime.program.runner import Bytes

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_loads = itertools.count(1)


ARCHITECTURES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64", 258: "loongarch64"}
"""The value of ``platform.machine()`` by ``e_machine`` of the ELF header (System V ABI, chapter 4)."""


def require_architecture(content: Bytes, where: str) -> None:
    """Raise a `WorkerError` about ``where`` if the library is not for this machine's architecture."""
    head = content[:20].tobytes()
    if len(head) < 20 or not head.startswith(b"\x7fELF"):
        raise WorkerError(f"{where}: the library is not an ELF shared object. Compile again")
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    architecture, here = ARCHITECTURES.get(number, f"ELF machine {number}"), platform.machine()
    if architecture != here and not (architecture == "armv7l" and here.startswith("armv")):
        raise WorkerError(
            f"{where}: the library was compiled for {architecture}, and this machine is {here}. Give the machine its "
            "right target in the cluster's description and compile again"
        )


@contextlib.contextmanager
def library_file(content: Bytes) -> Iterator[int]:
    """Yield the descriptor of a sealed, unnamed file in memory with ``content``; close it afterwards."""
    descriptor = os.memfd_create("library.so", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.data)
        file.flush()
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield descriptor


def load(descriptor: int) -> Any:
    """Load the library in a file as a TVM module. The file may be closed afterwards; the last reference unloads it.

    Each file can be loaded once: TVM keeps one context per file, so two stages must never share one.
    """
    # dlopen caches libraries by path, but descriptor numbers are reused. So each path contains the number of the load,
    # in binary: "/." is 1 and "/" is 0.
    number = f"{next(_loads):b}".replace("1", "/.").replace("0", "/")
    # What `tvm_ffi.load_module` calls for a name that ends in .so.
    return tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(f"/proc/self/fd{number}/{descriptor}", "so")
