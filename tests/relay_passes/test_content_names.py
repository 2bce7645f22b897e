"""Kernels are named by their operators and their code."""

import numpy as np
import tvm
from tvm import relax, te, tirx

from relay_passes.content_names import content_name, content_names
from tests.helpers.relax_graphs import QUICKLY
from tvm_split.compiler.stage import code_of


def elementwise(body) -> tirx.PrimFunc:
    x, y = te.placeholder((4,), name="x"), te.placeholder((4,), name="y")
    return te.create_prim_func([x, y, te.compute((4,), lambda i: body(x[i], y[i]))])


def test_a_name_has_the_operators_and_a_digest_of_the_code() -> None:
    add, subtract = elementwise(lambda x, y: x + y), elementwise(lambda x, y: x - y)
    name = content_name("fused_conv2d12_add3_relu", add)
    assert name.startswith("fused_conv2d_add_relu_")
    assert name == content_name("fused_conv2d_add_relu7", add.with_attr("global_symbol", "sum"))
    assert name != content_name("fused_conv2d12_add3_relu", subtract)


def test_equal_kernels_become_one_function_and_results_stay() -> None:
    x = relax.Var("x", relax.TensorType([4], "float32"))
    add, multiply = elementwise(lambda x, y: x + y), elementwise(lambda x, y: x * y)
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for name, kernel in {"add": add, "subtract": elementwise(lambda x, y: x - y), "multiply": multiply}.items():
                value = builder.emit(relax.call_tir(builder.add_func(kernel, name), (value, x), x.ty))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    module = builder.get()
    module["add1"] = add
    module.update_func(module.get_global_var("subtract"), add)
    renamed = content_names(module)
    names = {variable.name_hint.rpartition("_")[0] for variable in renamed.get_global_vars()}
    assert names == {"", "add", "subtract", "multiply"}  # add and add1 are one
    main = relax.VirtualMachine(code_of(renamed, QUICKLY), tvm.cpu())["main"]
    values = np.arange(4, dtype="float32")
    np.testing.assert_array_equal(main(tvm.runtime.tensor(values)).numpy(), 3 * values * values)
