"""The GPU description of a device, over TVM's RPC within this process, and the devices that are refused for it."""

import json

import pytest
import tvm_ffi
from tvm import rpc

from schedules.tuning.devices import GPU_FUNCTION, gpu_problem, misfit_in, session_of

GOOD = {"hostname": "box", "arch": "sm_90", "problem": "", "driver": 13000, "compiler": ""}


class Here:
    def connect_server(self):
        return rpc.LocalSession()


@pytest.fixture
def says():
    def register(**changes):
        tvm_ffi.register_global_func(GPU_FUNCTION, lambda: json.dumps({**GOOD, **changes}), override=True)

    yield register
    tvm_ffi.registry.remove_global_func(GPU_FUNCTION)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_the_right_gpu(says, arch):
    says()
    assert session_of(gpu_problem(arch, 13000, False))(Here()) is not None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"arch": "sm_80"}, "(the worker on box) has a GPU of sm_80, and the target says sm_90"),
        ({"driver": 12080}, "has a driver for CUDA 12.8, and the kernels need one for 13.0"),
        ({"arch": "", "problem": "no driver"}, "has no GPU to measure on, and the target says sm_90: no driver"),
        ({}, "has no nvcc, and neither has this machine"),
    ],
)
def test_others_are_refused_with_both_sides(says, answer, reason):
    says(**answer)
    with pytest.raises(RuntimeError) as caught:
        session_of(gpu_problem("sm_90", 13000, True))(Here())
    assert reason in misfit_in(str(caught.value))


def test_other_errors_are_no_refusals():
    assert not misfit_in("the line is busy")
