"""What `schedules.apply` ensures for every module."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

import schedules
from schedules import cpu
from schedules.blocks import new_schedule
from tests.helpers.schedules.schedule_harness import HOST, QUICK_HOST, evaluate, graph_of, lower, normal, run
from tvm_split.compiler.stage import code_of


def small_network(builder, x):
    weights = [normal(1, 32, 16, 3, 3), normal(2, 32, 32, 3, 3), normal(3, 32, 32, 3, 3)]
    for weight in weights:
        x = builder.emit(relax.op.nn.conv2d(x, relax.const(weight), padding=(1, 1)))
        x = builder.emit(relax.op.clip(x, 0, 6))
    return x


def test_the_same_module_gives_the_same_kernels_and_a_second_time_changes_nothing():
    first, second = (lower(graph_of(small_network, [normal(0, 1, 16, 9, 9)]), HOST) for _ in range(2))
    assert tvm_ffi.structural_equal(first, second)
    assert tvm_ffi.structural_equal(schedules.apply(first, HOST), second)


def test_clip_costs_no_layout_change():
    lowered = lower(graph_of(small_network, [normal(0, 1, 16, 9, 9)]), HOST)
    changes = [name for name in schedules.chosen_rules(lowered) if "layout_transform" in name]
    assert len(changes) == 2, "one at the input, one at the output"


def test_parts_of_rows_cost_no_layout_change():
    def network(parts):
        def graph(builder, x):
            image = builder.emit(relax.op.nn.conv2d(x, relax.const(normal(1, 32, 16, 3, 3)), padding=(1, 1)))
            slices = [builder.emit(relax.op.strided_slice(image, [2], [begin], [end])) for begin, end in parts]
            image = builder.emit(relax.op.concat(slices, axis=2)) if parts else image
            return builder.emit(relax.op.nn.conv2d(image, relax.const(normal(2, 32, 32, 3, 3)), padding=(1, 1)))

        return lower(graph_of(graph, inputs), HOST)

    inputs = [normal(0, 1, 16, 9, 9)]
    lowered = network([(0, 4), (4, 9)])
    assert len([name for name in schedules.chosen_rules(lowered) if "layout_transform" in name]) == 2
    assert np.array_equal(run(lowered, inputs), run(network([]), inputs))


def test_a_rule_that_fails_falls_to_the_next_and_says_so(monkeypatch, caplog):
    def fails(function, traits):
        new_schedule(function).get_sblock("nowhere")

    x = normal(0, 1, 16, 9, 9)
    reference = run(lower(graph_of(small_network, [x]), HOST), [x])
    monkeypatch.setattr(cpu, "RULES", tuple((name, fails if name != "fallback" else rule) for name, rule in cpu.RULES))
    actual, chosen = evaluate(small_network, [x])
    assert chosen == {"fallback"}
    warned = [record.getMessage() for record in caplog.records if record.name == "schedules.apply"]
    reason = "since the rule conv2d failed: ScheduleError: Cannot find a block with the specified name"
    assert any("conv2d" in message and message.endswith(reason) for message in warned)
    np.testing.assert_allclose(actual, reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("target", [HOST, tvm.target.Target({"kind": "cuda", "arch": "sm_80"})], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda data, places, rows: relax.op.scatter_elements(data, places, rows, 0, "add"),
        lambda data, places, rows: relax.op.scatter_nd(data, relax.op.strided_slice(places, [1], [0], [1]), rows),
        lambda data, places, rows: relax.op.cumsum(rows, 0),
        lambda data, places, rows: relax.op.sort(rows, 0),
        lambda data, places, rows: relax.op.topk(rows, 1, 0, "values"),
    ],
    ids=["scatter_elements", "scatter_nd", "cumsum", "sort", "topk"],
)
def test_kernels_that_tvm_writes_as_plain_code_are_compiled_without_a_word(operation, target, caplog, capfd):
    shapes = {"data": ((4, 3), "float32"), "places": ((2, 3), "int32"), "rows": ((2, 3), "float32")}
    variables = [relax.Var(name, relax.TensorType(*shape)) for name, shape in shapes.items()]
    lowered = lower(graph_of(lambda builder, *inputs: builder.emit(operation(*inputs)), variables), target)
    if target is HOST:
        code_of(lowered, QUICK_HOST)
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_symbolic_shapes_and_scans_are_right():
    x = relax.Var("x", relax.TensorType((tirx.Var("rows", "int64"), 16), "float32"))

    def graph(builder, x):
        return builder.emit(relax.op.nn.softmax(builder.emit(relax.op.cumsum(x, axis=1)), -1))

    lowered = lower(graph_of(graph, [x]), HOST)
    data = normal(0, 5, 16)
    total = np.cumsum(data.astype("float64"), axis=1)
    powers = np.exp(total - total.max(-1, keepdims=True))
    np.testing.assert_allclose(run(lowered, [data]), powers / powers.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
