"""The GPU description of a device, over TVM's RPC within this process, and the devices that are refused for it."""

import json

import pytest
import tvm_ffi
from tvm import rpc

from schedules.tuning.devices import GPU_FUNCTION, GpuNeeds, gpu_problem

GOOD = {"hostname": "box", "arch": "sm_90", "problem": "", "driver": 13000, "compiler": ""}


def problem_of(needed, is_source, **changes):
    """Return what is wrong with a GPU that differs from `GOOD` by ``changes``."""
    tvm_ffi.register_global_func(GPU_FUNCTION, lambda: json.dumps({**GOOD, **changes}), override=True)
    try:
        return gpu_problem(GpuNeeds(needed, 13000, is_source, str))(rpc.LocalSession())
    finally:
        tvm_ffi.registry.remove_global_func(GPU_FUNCTION)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_the_right_gpu(arch):
    assert not problem_of(arch, False)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"arch": "sm_80"}, "(the worker on box) has a GPU of sm_80, and the target says sm_90"),
        ({"driver": 12080}, "has a driver for CUDA 12.8, and the kernels need one for 13.0"),
        ({"arch": "", "problem": "no driver"}, "has no GPU to measure on, and the target says sm_90: no driver"),
        ({}, "has no nvcc, and neither has this machine"),
    ],
)
def test_others_are_refused_with_both_sides(answer, reason):
    assert reason in problem_of("sm_90", True, **answer)
