"""Link object files into shared libraries, for this host or for another architecture."""

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import tvm
from tvm.support.cc import get_cc

from tvm_split.compiler.targets import cpu_part
from tvm_split.errors import CompileError
from tvm_split.units import bytes_text

LARGEST_OBJECT_BYTES = 64 * 1024 * 1024
"""The file size that a compilation may need: several times the largest object file of a stage, without weights."""


@dataclass(frozen=True)
class Linker:
    """Links ``library`` with files in ``folder``; ``purpose`` names the library in errors."""

    command: Sequence[str]
    triple: str
    library: Path
    purpose: str
    folder: Path

    def link(self, objects: Mapping[str, bytes]) -> None:
        """Link object files."""
        paths = {str(self.folder / f"{number}.o"): content for number, content in enumerate(objects.values())}
        for path, content in paths.items():
            Path(path).write_bytes(content)
        self(str(self.library), list(paths))

    def export(self, module: Any) -> None:
        """Link a module of TVM, and what it imports."""
        module.export_library(str(self.library), fcompile=self, workspace_dir=str(self.folder))

    def static_libraries(self, objects: Mapping[str, bytes]) -> list[Any]:
        """Return a module for each object file, by its symbol, which another module may import."""
        libraries = []
        for symbol, content in objects.items():
            with in_memory(symbol) as (file, path):
                file.write(content)
                file.flush()
                libraries.append(tvm.runtime.load_static_library(path, [symbol]))
        return libraries

    def get_target_triple(self) -> str:
        """Return the triple of the library's architecture; TVM calls this."""
        return self.triple

    def __call__(self, output: str, objects: Sequence[str], options: Sequence[str] = ()) -> None:
        arguments = [*self.command, "-shared", "-fPIC", "-o", output, *objects, *options]
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode != 0:
            reason = "; ".join(result.stderr.split("\n")).strip("; ")
            where = f"linking {self.purpose} in {self.library.parent} with {self.command[0]}"
            raise CompileError(f"{where} failed: {reason}")


@contextmanager
def in_memory(name: str) -> Iterator[tuple[BinaryIO, str]]:
    """Yield a file in memory, and its path: LLVM ends the process if a disk is full."""
    with open(os.memfd_create(name), "w+b") as file:  # noqa: PTH123
        yield file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


@contextmanager
def linker(target: Mapping[str, Any], library: Path, purpose: str) -> Iterator[Linker]:
    """Yield a linker of ``library``. Its other files lie beside the library, so they are removed even after a crash.

    Raises:
        CompileError: this host has no linker for the target's architecture, or limits files too much.
    """
    _require_large_files(purpose)
    command = link_command(target, purpose) or [get_cc()]
    triple = str(cpu_part(target).get("mtriple", "")) or str(tvm.target.codegen.llvm_get_system_triple())
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ExitStack() as files:
        for name in ("lib0.o", "devc.o"):  # the files that LLVM writes
            _, path = files.enter_context(in_memory(name))
            (Path(folder) / name).symlink_to(path)
        yield Linker(command, triple, library, purpose, Path(folder))


def _require_large_files(purpose: str) -> None:
    """Raise a `CompileError` if the limit on file sizes, also in memory, is below `LARGEST_OBJECT_BYTES`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < LARGEST_OBJECT_BYTES:
        raise CompileError(
            f"{purpose} cannot be compiled where files are limited to {bytes_text(limit)}, since object files may have "
            f"{bytes_text(LARGEST_OBJECT_BYTES)}: raise the limit (ulimit -f)"
        )


def link_command(target: Mapping[str, Any], purpose: str) -> list[str] | None:
    """Return the command that links for a target's architecture; None for this host's own architecture.

    Raises:
        CompileError: this host has no linker for the architecture.
    """
    architecture = str(cpu_part(target).get("mtriple", "")).partition("-")[0]
    if architecture in ("", str(tvm.target.codegen.llvm_get_system_triple()).partition("-")[0]):
        return None
    command = _cross_linker(architecture)
    if command is None:
        raise CompileError(
            f"{purpose} is for {architecture}, and no linker for it is here; install the extra tvm-split[cross], or "
            f"a compiler named {architecture}-linux-gnu-gcc"
        )
    return command


def _cross_linker(architecture: str) -> list[str] | None:
    """Return a command that links for Linux on another architecture: a cross gcc, or zig from the extra ``cross``."""
    compiler = shutil.which(f"{architecture}-linux-gnu-gcc")
    if compiler is not None:
        return [compiler]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu"]
    return None
