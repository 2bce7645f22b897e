import numpy as np
import tvm
from tvm import relax

from relay_passes.ir import bindings_of
from relay_passes.unique_names import unique_names
from tests.helpers.placements import Whole, run


def doubled_names() -> tvm.IRModule:
    """``x * 2 + 1``, in which both results are named ``lv``, and the parameter too."""
    x = relax.Var("lv", relax.TensorType((2,), "float32"))
    first = relax.DataflowVar("lv", relax.TensorType((2,), "float32"))
    second = relax.Var("lv", relax.TensorType((2,), "float32"))
    result = relax.Var("result", relax.TupleType([relax.TensorType((2,), "float32")]))
    block = relax.DataflowBlock(
        [
            relax.VarBinding(first, relax.op.multiply(x, relax.const(2.0, "float32"))),
            relax.VarBinding(second, relax.op.add(first, relax.const(1.0, "float32"))),
            relax.VarBinding(result, relax.Tuple([second])),
        ]
    )
    body = relax.SeqExpr([block], result)
    function = relax.Function([x], body, result.ty).with_attr("global_symbol", "main")
    return relax.transform.Normalize()(tvm.IRModule({"main": function}))


def test_variables_get_names_of_their_own() -> None:
    before = doubled_names()
    after = unique_names(before)
    function = after["main"]
    names = [variable.name for variable in (*function.params, *(binding.var for binding in bindings_of(function)))]
    assert names == ["lv", "lv_2", "lv_3", "result"]
    x = np.array([3.0, 4.0], np.float32)
    np.testing.assert_array_equal(run(after, x)[0], [7.0, 9.0])


def test_unique_names_stay() -> None:
    assert unique_names(Whole).same_as(Whole)
