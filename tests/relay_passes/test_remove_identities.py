import tvm
from tvm.script import ir as I, relax as R

from relay_passes.remove_identities import remove_identities


def test_what_computes_nothing_goes() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                wide = R.broadcast_to(x, R.shape([2, 3]))
                total = R.add(wide, y)
                flat = R.reshape(total, R.shape([2, 3]))
                result = (R.nn.relu(flat),)
                R.output(result)
            return result

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                total = R.add(x, y)
                last = R.nn.relu(total)
                result = (last,)
                R.output(result)
            return result

    tvm.ir.assert_structural_equal(remove_identities(tvm.relax.transform.Normalize()(Before)), Expected)


def test_what_computes_something_stays() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                wide = R.broadcast_to(x, R.shape([4, 2, 3]))
                flat = R.reshape(x, R.shape([3, 2]))
                result = (wide, flat)
                R.output(result)
            return result

    tvm.ir.assert_structural_equal(remove_identities(Before), Before)
