"""GPU code in a library: packed, unpacked, and compiled from source by the loading machine."""

from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies

from rpc_runtime.execution import cuda_code
from rpc_runtime.execution.cuda_code import NvccError, binary_of, fatbin, marked, packed
from tests.helpers.answer import answer
from tests.helpers.gpu_driver import require_toolkit
from tests.helpers.waiting import eventually

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
FATBIN = bytes.fromhex("50ed55ba")
"""The first bytes of such files (fatbinary_section.h)."""


@given(strategies.binary(max_size=200))
def test_code_comes_back_as_it_was(binary: bytes) -> None:
    assert binary_of(packed(binary, "sm_90")) == binary


@pytest.mark.parametrize("code", ["", "__global__ void f() {}", "// tvm-split: fatbin sm_90\n???", "// packed"])
def test_what_is_not_ours_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="CUDA code"):
        binary_of(code)


OTHERS = """
import json, sys
import tvm_ffi
from rpc_runtime.execution.cuda_code import CALLBACK, packed, register_loader
tvm_ffi.register_global_func(CALLBACK, lambda code: code.upper().encode(), override=True)
register_loader()
load = tvm_ffi.get_global_func(CALLBACK)
print(json.dumps([bytes(load(code)).decode() for code in ("a kernel of TVM's own", packed(b"a kernel", "sm_90"))]))
"""


def test_cuda_code_that_is_not_ours_stays_with_tvm() -> None:
    """On a machine with a GPU, TVM asks for the machine code of every CUDA module, also of a user's own."""
    assert answer("-c", OTHERS, environment={}) == ["A KERNEL OF TVM'S OWN", "a kernel"]


def test_source_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_code, "find_nvcc", lambda: None)
    with pytest.raises(NvccError, match="compile again where there is one"):
        binary_of(marked(KERNEL, "sm_90"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_source_is_compiled_where_it_arrives(arch: str) -> None:
    require_toolkit()
    binary = binary_of(marked(KERNEL, arch))
    assert binary.startswith(FATBIN)
    assert b"twice" in binary


def test_complaints_are_those_of_nvcc() -> None:
    require_toolkit()
    with pytest.raises(NvccError, match=r"sm_90: .*error.*nothing"):
        fatbin('extern "C" __global__ void f() { nothing(); }', "sm_90")
    with pytest.raises(NvccError, match=r"sm_1.*"):
        fatbin(KERNEL, "sm_1")


def test_a_compiler_that_takes_too_long_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    slow = tmp_path / "nvcc"
    slow.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {started}\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setattr(cuda_code, "find_nvcc", lambda: slow)
    monkeypatch.setattr(cuda_code, "COMPILE_SECONDS", 5.0)
    with pytest.raises(NvccError, match="took longer than 5 s"):
        fatbin(KERNEL, "sm_90")
    eventually(lambda: not runs(int(started.read_text())), "what the compiler started has ended")


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
