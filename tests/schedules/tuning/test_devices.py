"""The GPU description of a device, over TVM's RPC within this process, and the devices that are refused for it."""

import json

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import rpc, te

from schedules.tuning.devices import FILLED_ELEMENTS, GPU_FUNCTION, GpuNeeds, gpu_problem, timed_in_turn

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


@pytest.mark.parametrize(("seconds", "runs"), [(60.0, 5), (0.0, 1)])
def test_large_arguments_are_filled_and_runs_fit_the_time(tmp_path, seconds, runs):
    elements = FILLED_ELEMENTS + 3  # of the second argument: more than are drawn
    x, y = te.placeholder((4,), name="x"), te.placeholder((elements,), name="y")
    function = te.create_prim_func([x, y, te.compute((4,), lambda i: x[i] + y[elements - 1 - i], name="z")])
    library = tmp_path / "kernel.so"
    tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm").export_library(library)
    evicted = []
    tvm_ffi.register_global_func("tests.evict", lambda *arrays: evicted.append(arrays[1].numpy()[-4:]), override=True)
    try:
        arguments = [((4,), "float32"), ((elements,), "float32"), ((4,), "float32")]
        times = timed_in_turn(None, arguments, ("main", "main"), 3, 5, "cpu", "tests.evict", seconds)(str(library))
    finally:
        tvm_ffi.registry.remove_global_func("tests.evict")
    assert len(times) == 2 * 3
    assert len(evicted) >= 2 * 3 * runs
    assert (len(evicted) >= 2 * 3 * 5) == (runs == 5)
    assert np.isfinite(evicted[-1]).all()
    assert evicted[-1].any()
