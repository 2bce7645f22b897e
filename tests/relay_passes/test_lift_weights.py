import numpy as np
import tvm
from tvm.script import ir as I, relax as R

from relay_passes.lift_weights import lift_weights
from tests.helpers.placements import run

LARGE = tvm.runtime.tensor(np.arange(64, dtype="float32").reshape(8, 8))
SMALL = np.ones((1, 8), "float32")


def test_large_constants_become_parameters_once() -> None:
    shared = tvm.relax.const(LARGE)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 8), "float32")):
            with R.dataflow():
                first = R.matmul(x, shared)
                second = R.add(first, R.const(SMALL))
                third = R.matmul(second, shared)
                result = (third,)
                R.output(result)
            return result

    lifted, weights = lift_weights(Before)
    assert [parameter.name for parameter in lifted["main"].params] == ["x", "weight_0"]
    np.testing.assert_array_equal(weights[0].numpy(), LARGE.numpy())
    x = np.linspace(0, 1, 8, dtype="float32").reshape(1, 8)
    np.testing.assert_array_equal(run(lifted, x, weights=weights)[0], run(Before, x)[0])
