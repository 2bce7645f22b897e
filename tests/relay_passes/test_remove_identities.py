from __future__ import annotations

import tvm
from tvm.script import ir as I, relax as R

from relay_passes.remove_identities import RemoveIdentities


def test_what_computes_nothing_goes() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                dropped = R.nn.dropout(x, rate=0.5)
                data = dropped[0]
                wide = R.broadcast_to(data, R.shape([2, 3]))
                stacked = R.stack((wide, y, wide), axis=1)
                total = R.sum(stacked, axis=[1], keepdims=False)
                flat = R.reshape(total, R.shape([2, 3]))
                result = (R.nn.relu(flat),)
                R.output(result)
            return result

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                first = R.add(x, y)
                second = R.add(first, x)
                last = R.nn.relu(second)
                result = (last,)
                R.output(result)
            return result

    tvm.ir.assert_structural_equal(RemoveIdentities()(tvm.relax.transform.Normalize()(Before)), Expected)


def test_what_computes_something_stays() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                wide = R.broadcast_to(x, R.shape([4, 2, 3]))
                flat = R.reshape(x, R.shape([3, 2]))
                stacked = R.stack((x, x), axis=1)
                other_axis = R.sum(stacked, axis=[2], keepdims=False)
                kept_axis = R.sum(stacked, axis=[1], keepdims=True)
                result = (wide, flat, other_axis, kept_axis)
                R.output(result)
            return result

    tvm.ir.assert_structural_equal(RemoveIdentities()(Before), Before)
