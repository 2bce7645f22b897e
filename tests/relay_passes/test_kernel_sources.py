"""Kernels lead back to the operations they were fused from."""

import numpy as np
import tvm
from tvm import relax

from relay_passes.kernel_sources import kernel_sources
from relay_passes.unique_names import unique_names


def lowered_and_fused(build) -> tuple[tvm.IRModule, tvm.IRModule]:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(build(builder, x))
        builder.emit_func_output(result)
    transform = relax.transform
    lowered = transform.AnnotateTIROpPattern()(transform.LegalizeOps()(builder.get()))
    lowered = unique_names(lowered)
    return lowered, unique_names(transform.FuseOps()(lowered))


def claimed(lowered: tvm.IRModule, fused: tvm.IRModule) -> list[tuple[str, ...]]:
    """The named operations of each kernel; ``gv`` is the name that the function's result has besides."""
    claims = kernel_sources(lowered, fused).values()
    return sorted(tuple(name for name in sources if not name.startswith("gv")) for sources in claims if sources)


def test_a_fused_chain_names_all_its_operations() -> None:
    def graph(builder, x):
        y = builder.emit(relax.op.add(x, relax.const(np.ones((4, 8), "float32"))), name_hint="sum")
        y = builder.emit(relax.op.nn.relu(y), name_hint="positive")
        y = builder.emit(relax.op.matmul(y, relax.const(np.ones((8, 8), "float32"))), name_hint="product")
        return builder.emit(relax.op.tanh(y), name_hint="bounded")

    assert claimed(*lowered_and_fused(graph)) == [("product", "bounded"), ("sum", "positive")]


def test_equal_groups_keep_their_own_names() -> None:
    """FuseOps gives equal groups one function, whose inner names are those of the first."""
    weight = relax.const(np.ones((8, 8), "float32"))

    def graph(builder, x):
        for number in range(3):
            x = builder.emit(relax.op.matmul(x, weight), name_hint=f"product_{number}")
            x = builder.emit(relax.op.nn.relu(x), name_hint=f"positive_{number}")
        return x

    assert claimed(*lowered_and_fused(graph)) == [(f"product_{number}", f"positive_{number}") for number in range(3)]


def test_equal_operations_on_equal_values_are_taken_once_each() -> None:
    def graph(builder, x):
        parts = [builder.emit(relax.op.nn.softmax(x), name_hint=f"part_{number}") for number in range(2)]
        return builder.emit(
            relax.op.matmul(parts[0], builder.emit(relax.op.permute_dims(parts[1]))), name_hint="product"
        )

    names = [name for sources in claimed(*lowered_and_fused(graph)) for name in sources]
    assert sorted(names) == sorted(set(names))
    assert {"part_0", "part_1", "product"} <= set(names)


def test_a_second_name_for_a_result_belongs_to_its_kernel() -> None:
    def graph(builder, x):
        y = builder.emit(relax.op.nn.softmax(x), name_hint="lv")
        again = relax.DataflowVar("scores", y.ty)
        builder.emit_normalized(relax.VarBinding(again, y))
        return builder.emit(relax.op.matmul(again, relax.const(np.ones((8, 8), "float32"))), name_hint="product")

    assert claimed(*lowered_and_fused(graph)) == [("lv", "scores"), ("product",)]
