import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


def test_every_kernel_with_its_layers(invoke_json, onnx_path):
    profile = invoke_json("profile", onnx_path, "--threads", "1", "--rounds", "2")
    layers = [layer for kernel in profile["kernels"] for layer in kernel["layers"]]
    assert {"conv_1", "relu_1", "conv_2", "dense"} <= set(layers)
    assert profile["threads"] == 1
    shares = sum(kernel["share_of_time"] for kernel in profile["kernels"])
    assert shares + max(0, profile["other_seconds"]) / profile["seconds"] == pytest.approx(1.0)
    assert all(kernel["seconds"] > 0 for kernel in profile["kernels"])
    assert profile["ceilings"]["operations_per_second"] > 1e9
    assert profile["ceilings"]["bytes_per_second"] > 1e8
    firsts = [kernel["layers"][0] for kernel in profile["kernels"] if kernel["layers"]]
    assert firsts.index("conv_1") < firsts.index("conv_2") < firsts.index("dense")


def test_a_table(invoke, onnx_path):
    text = invoke("profile", onnx_path, "--threads", "1", "--rounds", "1").stdout
    assert "conv_1" in text
    assert "both measured now" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_network_without_a_kernel(invoke, invoke_json, tmp_path):
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "same.onnx"
    )
    assert invoke_json("profile", tmp_path / "same.onnx", "--threads", "1", "--rounds", "1")["kernels"] == []
    invoke("profile", tmp_path / "same.onnx", "--threads", "1", "--rounds", "1")


def test_indices_cannot_be_made_up(invoke, tmp_path):
    node = helper.make_node("Gather", ["table", "words"], ["rows"], name="lookup")
    graph = helper.make_graph(
        [node],
        "words",
        [helper.make_tensor_value_info("words", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, [4, 3])],
        [numpy_helper.from_array(np.ones((5, 3), np.float32), "table")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "w.onnx")
    assert "example inputs" in invoke("profile", tmp_path / "w.onnx", code=1).stderr


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache", "busy_machine")
def test_pieces_on_workers(invoke, invoke_json, onnx_path):
    profile = invoke_json("profile", onnx_path, "--workers", "2")
    assert [machine["machine"] for machine in profile["machines"]] == ["machine-a", "machine-b"]
    layers = [layer for piece in profile["pieces"] for layer in piece["layers"]]
    assert {"conv_1", "relu_1", "conv_2", "dense"} <= set(layers)
    assert all(report["measured"] and not report["cached"] for report in profile["reports"])
    text = " ".join(invoke("profile", onnx_path, "--workers", "2").stdout.split())
    assert "cached" in text
    assert "--refresh" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "1", "--calls"], "--calls"),
        (["--workers", "1", "--rounds", "3"], "--rounds"),
        (["--refresh"], "--refresh"),
        (["--cluster", "nothing.yaml", "--workers", "1"], "--workers"),
    ],
)
def test_options_that_do_not_fit(invoke, onnx_path, arguments, words):
    assert words in invoke("profile", onnx_path, *arguments, code=2).stderr
