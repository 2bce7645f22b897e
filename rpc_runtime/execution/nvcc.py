"""NVIDIA's compiler, where there is one: the source of CUDA kernels to code for a GPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.scratch import ScratchFolder

COMPILE_SECONDS = 1800.0
_ANSWER_SECONDS = 30.0
# TVM's kernels compute with halves by the usual operators, which the headers of a torch build would turn off.
_OPTIONS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "--split-compile=0")
_SPILLED = re.compile(r"(\d+) bytes spill stores")


class NvccError(TvmSplitError):
    """The compiler does not take a source; the message has its first complaint."""


@cache
def find_nvcc() -> Path | None:
    """Of the PATH, of $CUDA_HOME, of the usual place, or of the packages that pip installs (``nvidia-cuda-nvcc``)."""
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
    """Where pip puts CUDA's packages: ``nvidia/cu13`` beside all others. Or another of NVIDIA's, by its ``name``."""
    found = find_spec("nvidia")
    places = found.submodule_search_locations if found is not None else None
    return [folder for place in places or () for folder in sorted(Path(place).glob(name), reverse=True)]


@cache
def toolkit_version() -> tuple[int, int] | None:
    """Of the compiler that is found: (13, 0). None where there is none, or it does not say."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    try:
        said = subprocess.run(  # noqa: S603 (no shell)
            [nvcc, "--version"], capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"release (\d+)\.(\d+)", said)
    return (int(version.group(1)), int(version.group(2))) if version else None


def toolkit_text() -> str:
    """The same as people write it: 13.0; empty where there is none."""
    version = toolkit_version()
    return "" if version is None else f"{version[0]}.{version[1]}"


def fatbin(source: str, arch: str) -> bytes:
    """Machine code for a GPU of ``arch`` (``sm_90``), and PTX of it for GPUs of later kinds, in one file.

    Raises:
        NvccError: there is no compiler, or it does not take the source or the architecture.
    """
    # sm_90a has PTX for no other kind.
    code, _ = _assembled(source, arch, [arch] if arch[-1:].isalpha() else [arch, _virtual(arch)])
    return code


def unspilled(source: str, arch: str) -> bytes:
    """Machine code for a GPU of ``arch`` alone, of kernels whose values all have registers: `fatbin` for a tuner.

    Raises:
        NvccError: as `fatbin`, or registers are spilled to memory.
    """
    code, said = _assembled(source, arch, [arch], "-Xptxas", "-v")
    spilled = max((int(count) for count in _SPILLED.findall(said)), default=0)
    if spilled:
        raise NvccError(f"a thread spills {spilled} bytes of registers to memory on {arch}")
    return code


def _virtual(arch: str) -> str:
    return arch.replace("sm_", "compute_")


def _assembled(source: str, arch: str, codes: Sequence[str], *options: str) -> tuple[bytes, str]:
    """One file with code of each kind, and the compiler's words."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise NvccError("there is no nvcc: install CUDA's toolkit, or pip install 'tvm-split[cuda]'")
    with ScratchFolder("nvcc") as folder:
        path, result = folder.path / "kernels.cu", folder.path / "kernels.fatbin"
        path.write_text(source, encoding="utf-8")
        targets = [word for code in codes for word in ("-gencode", f"arch={_virtual(arch)},code={code}")]
        command = [str(nvcc), "-fatbin", *_OPTIONS, *targets, *options, "-o", str(result), str(path)]
        exit_code, said = _run(command)
        if exit_code != 0:
            raise NvccError(f"{nvcc} for {arch}: {_complaint(said)}")
        return result.read_bytes(), said


def _run(command: list[str]) -> tuple[int, str]:
    """The exit code and words of a compiler, which ends with all that it started, whatever happens here."""
    with subprocess.Popen(  # noqa: S603 (no shell)
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise NvccError(f"{command[0]} took longer than {COMPILE_SECONDS:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said


def _complaint(said: str) -> str:
    lines = said.splitlines()
    errors = [line for line in lines if "error" in line or "fatal" in line] or lines
    return (errors or ["it ended without a word"])[0].strip()
