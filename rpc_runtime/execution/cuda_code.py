"""CUDA kernels in the library of a stage: machine code that a worker loads without a compiler.

If TVM 0.27 compiles without a GPU, the library contains the source of its kernels as a string. When the library is
loaded, a registered function must return the machine code for that string. Here the string is the machine code itself,
packed as text, and the worker's function unpacks it. If the compiling machine had no nvcc, the string is the source,
and the worker compiles it if it has nvcc, NVIDIA's compiler.
"""

import base64
import binascii
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.scratch import ScratchFolder

PACKED, SOURCE = "// tvm-split: fatbin ", "// tvm-split: source "
"""Prefixes of the string; the architecture follows up to the end of the line."""
CALLBACK = "tvm_callback_cuda_compile"
COMPILE_SECONDS = 1800.0
_ANSWER_SECONDS = 30.0
# TVM's kernels use the usual operators on half-precision values, which the options of a torch build would turn off.
_OPTIONS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "--split-compile=0")
_SPILLED = re.compile(r"(\d+) bytes spill stores")


class NvccError(TvmSplitError):
    """nvcc is missing or rejects a source; the message has its first error."""


@cache
def find_nvcc() -> Path | None:
    """Return nvcc from the PATH, $CUDA_HOME, /usr/local/cuda, or pip's packages (``nvidia-cuda-nvcc``); else None."""
    on_path = shutil.which("nvcc")
    for path in (*([Path(on_path)] if on_path else []), *_usual_places()):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def _usual_places() -> Iterator[Path]:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        yield Path(home) / "bin/nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")
    for folder in installed_folders():
        yield folder / "bin/nvcc"


def installed_folders(name: str = "cu[0-9]*") -> list[Path]:
    """Return pip's folders of CUDA, such as ``nvidia/cu13``, or of another NVIDIA package by ``name`` (a glob)."""
    package = find_spec("nvidia")
    places = package.submodule_search_locations if package is not None else None
    return [folder for place in places or () for folder in sorted(Path(place).glob(name), reverse=True)]


@cache
def toolkit_version() -> tuple[int, int] | None:
    """Return the version of nvcc, such as (13, 0); None if nvcc or its version is not found."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    try:
        output = subprocess.run(  # noqa: S603 (no shell)
            [nvcc, "--version"], capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"release (\d+)\.(\d+)", output)
    return (int(version.group(1)), int(version.group(2))) if version else None


def toolkit_text() -> str:
    """Return the version of nvcc as text, such as 13.0; empty if there is none."""
    version = toolkit_version()
    return "" if version is None else f"{version[0]}.{version[1]}"


def fatbin(source: str, arch: str) -> bytes:
    """Return CUDA source compiled to machine code for GPUs of ``arch`` (``sm_90``), and to PTX for later architectures.

    Raises:
        NvccError: there is no nvcc, or it rejects the source or the architecture.
    """
    # The PTX of sm_90a runs on no other architecture.
    code, _ = _assembled(source, arch, [arch] if arch[-1:].isalpha() else [arch, _virtual(arch)])
    return code


def unspilled(source: str, arch: str) -> bytes:
    """Return what `fatbin` does, but without PTX, and reject kernels that spill registers; for a tuner.

    Raises:
        NvccError: as `fatbin`, or a kernel spills registers to memory.
    """
    code, output = _assembled(source, arch, [arch], "-Xptxas", "-v")
    spilled = max((int(count) for count in _SPILLED.findall(output)), default=0)
    if spilled:
        raise NvccError(f"a thread spills {spilled} bytes of registers to memory on {arch}")
    return code


def _virtual(arch: str) -> str:
    return arch.replace("sm_", "compute_")


def _assembled(source: str, arch: str, codes: Sequence[str], *options: str) -> tuple[bytes, str]:
    """Compile CUDA source to a fatbin with nvcc's ``codes``, such as ``sm_90``; return it and nvcc's output."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise NvccError("there is no nvcc: install CUDA's toolkit, or pip install 'tvm-split[cuda]'")
    with ScratchFolder("nvcc") as folder:
        path, result = folder.path / "kernels.cu", folder.path / "kernels.fatbin"
        path.write_text(source, encoding="utf-8")
        targets = [word for code in codes for word in ("-gencode", f"arch={_virtual(arch)},code={code}")]
        command = [str(nvcc), "-fatbin", *_OPTIONS, *targets, *options, "-o", str(result), str(path)]
        exit_code, output = _run(command)
        if exit_code != 0:
            raise NvccError(f"{nvcc} for {arch}: {_complaint(output)}")
        return result.read_bytes(), output


def _run(command: list[str]) -> tuple[int, str]:
    """Run a compiler; return its exit code and output. On any error, its whole process group is killed."""
    with subprocess.Popen(  # noqa: S603 (no shell)
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise NvccError(f"{command[0]} took longer than {COMPILE_SECONDS:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output


def _complaint(output: str) -> str:
    lines = output.splitlines()
    errors = [line for line in lines if "error" in line or "fatal" in line] or lines
    return (errors or ["it failed without a message"])[0].strip()


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
        raise ValueError("this library has CUDA code in an unknown form: compile again")
    if find_nvcc() is None:
        raise NvccError(
            "its CUDA kernels are source, because they were compiled without nvcc, and this machine has no nvcc "
            "either: compile again where there is one"
        )
    return fatbin(rest, head.removeprefix(SOURCE))


@cache
def register_loader() -> None:
    """Make TVM's runtime load the output of `packed` and `marked` by `binary_of`, and other CUDA code as before."""
    import tvm_ffi

    of_tvm = tvm_ffi.get_global_func(CALLBACK, allow_missing=True)

    def load(code: str) -> Any:
        is_ours = of_tvm is None or code.startswith((PACKED, SOURCE))
        return binary_of(code) if is_ours else of_tvm(code)

    tvm_ffi.register_global_func(CALLBACK, load, override=True)
