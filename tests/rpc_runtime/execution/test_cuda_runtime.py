"""TVM's GPU library in a worker's process: loaded if there is a driver, otherwise with a reason."""

from pathlib import Path

import pytest

from tests.helpers.answer import answer
from tests.helpers.gpu_driver import driver_for, require_toolkit

ASK = """
import json, sys
from rpc_runtime.worker.runtime_alone import load_runtime
load_runtime()
import tvm, tvm_ffi
from rpc_runtime.execution.cuda_runtime import driver_version, load_cuda
registered = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is not None
print(json.dumps([driver_version(), load_cuda(), registered, bool(tvm.cuda(0).exist) if registered else False]))
"""


def cuda_state(environment: dict[str, str]) -> list[object]:
    return list(answer("-c", ASK, environment=environment))


def test_with_a_driver_tvms_library_is_loaded(tmp_path: Path) -> None:
    """A worker imports TVM's package without running it, which otherwise loads this library: GPUs were never found."""
    require_toolkit()
    assert cuda_state(driver_for(13000, tmp_path)) == [13000, "", True, False]


def test_without_a_driver_that_is_the_reason() -> None:
    driver, problem, _, _ = cuda_state({})
    if driver:
        pytest.skip("there is a driver here")
    assert "no NVIDIA driver" in str(problem)
