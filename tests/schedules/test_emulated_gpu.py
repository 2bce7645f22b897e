"""The emulator of GPUs notices missing barriers, races of threads, and threads that wait for different things."""

import numpy as np
import pytest
from tvm.script import ir as I, relax as R, tirx as T

from tests.helpers.schedules.emulated_gpu import GPU, ORDERS, SM_90, kernels, run_kernels
from tests.helpers.schedules.gpu_kernels import needs_headers

pytestmark = needs_headers

TURNED = """
extern "C" __global__ void __launch_bounds__(64) turned(float* __restrict__ values) {
  __shared__ alignas(64) float shared[64];
  shared[threadIdx.x] = values[threadIdx.x];
  BARRIER
  values[threadIdx.x] = shared[63 - threadIdx.x];
}
"""


def turned(barrier, folder, *orders):
    """Return what the kernel makes of 0, 1, … in each order of threads."""
    results = np.tile(np.arange(64, dtype="float32"), (len(orders), 1))
    launch = kernels(TURNED.replace("BARRIER", barrier), {"turned": ("threadIdx.x",)}, folder)["turned"]
    for order, values in zip(orders, results, strict=True):
        launch(order, values.ctypes.data, 64)
    return results


@pytest.mark.parametrize("barrier", ["__syncthreads();", ""])
def test_a_barrier_that_is_missing_shows(barrier, tmp_path):
    for order, values in zip(ORDERS, turned(barrier, tmp_path, *ORDERS), strict=True):
        assert np.array_equal(values, np.arange(64)[::-1]) == bool(barrier)
        assert (values.view("uint32") == order.byte * 0x01010101).any() != bool(barrier)


def writing(stride, size):
    """A module of which thread n writes to place n * stride of a result: all to one, or only to some."""

    @I.ir_module
    class Writing:
        @T.prim_func(private=True, s_tir=True)
        def write(x: T.Buffer((64,), "float32"), y: T.Buffer((size,), "float32")):
            T.func_attr({"tirx.is_scheduled": True})
            for block in T.thread_binding(1, thread="blockIdx.x"):
                for thread in T.thread_binding(64, thread="threadIdx.x"):
                    with T.sblock("write"):
                        number = T.axis.spatial(64, block * 64 + thread)
                        y[number * stride] = x[number]

        @R.function
        def main(x: R.Tensor((64,), "float32")) -> R.Tensor((size,), "float32"):
            with R.dataflow():
                y = R.call_tir(Writing.write, (x,), out_ty=R.Tensor((size,), "float32"))
                R.output(y)
            return y

    return Writing


@pytest.mark.skipif(bool(GPU), reason="kernels run on the GPU")
def test_a_result_with_places_that_no_thread_writes_is_an_error():
    with pytest.raises(RuntimeError, match="memory that none wrote"):
        run_kernels(writing(2, 128), [np.arange(64, dtype="float32")], SM_90)


@pytest.mark.skipif(bool(GPU), reason="kernels run on the GPU")
@pytest.mark.parametrize("even", [False, True])
def test_a_result_that_depends_on_the_order_of_threads_is_an_error(even):
    x = np.zeros(64, "float32") if even else np.arange(64, dtype="float32")
    if even:
        assert run_kernels(writing(0, 1), [x], SM_90) == [0]
    else:
        with pytest.raises(RuntimeError, match="the result depends on which threads"):
            run_kernels(writing(0, 1), [x], SM_90)


UNSET = """
extern "C" __global__ void __launch_bounds__(64) unset(float* __restrict__ values) {
  MEMORY float memory[64];
  values[threadIdx.x] = max(values[threadIdx.x], memory[threadIdx.x]);
}
"""


@pytest.mark.parametrize("memory", ["__shared__", "volatile"])
def test_memory_that_is_read_before_it_is_written_shows(memory, tmp_path):
    launch = kernels(UNSET.replace("MEMORY", memory), {"unset": ("threadIdx.x",)}, tmp_path)["unset"]
    results = np.zeros((len(ORDERS), 64), "float32")
    for order, values in zip(ORDERS, results, strict=True):
        launch(order, values.ctypes.data, 64)
    assert (results != results[0]).any(axis=0).all()


TWO_TYPES = """
extern "C" __global__ void __launch_bounds__(32) shuffled(float* __restrict__ values, int* __restrict__ numbers) {
  float value = __shfl_sync(~0u, values[threadIdx.x], SOURCE);
  int number = __shfl_sync(~0u, numbers[threadIdx.x], SOURCE);
  values[threadIdx.x] = value;
  numbers[threadIdx.x] = number;
}
"""


@pytest.mark.parametrize(("order", "source"), [(ORDERS[0], 0), (ORDERS[1], 31)])
def test_lanes_exchange_values_of_several_types(order, source, tmp_path):
    values, numbers = np.arange(1, 33, dtype="float32"), np.arange(101, 133, dtype="int32")
    launch = kernels(TWO_TYPES.replace("SOURCE", str(source)), {"shuffled": ("threadIdx.x",)}, tmp_path)["shuffled"]
    launch(order, values.ctypes.data, numbers.ctypes.data, 32)
    assert set(values) == {source + 1}
    assert set(numbers) == {source + 101}


def test_threads_that_wait_for_different_things_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="turned: threads of a block wait for different things: 0 __syncwarp"):
        turned("if (threadIdx.x < 8) { __syncwarp(); } else { __syncthreads(); }", tmp_path, ORDERS[0])
