import json

import numpy as np
import onnx
import pytest

import tvm_split
from tests.models.small_onnx_model import INPUT_SHAPE, OUTPUT_SHAPE, small_model

pytestmark = pytest.mark.usefixtures("busy_machine")


@pytest.fixture
def images(tmp_path):
    """Three micro-batches, in a file and as an array."""
    values = np.random.default_rng(7).standard_normal((3, *INPUT_SHAPE)).astype(np.float32)
    np.savez(tmp_path / "images.npz", image=values)
    return tmp_path / "images.npz", values


def only_array(path):
    with np.load(path) as content:
        (name,) = content.files
        return content[name]


def test_what_was_compiled(invoke_json, onnx_path, tmp_path):
    folder = tmp_path / "bundle"
    compiled = invoke_json("compile", onnx_path, "--output", folder, "--workers", "1", "--dump", tmp_path / "dump")
    (stage,) = compiled["stages"]
    assert compiled["folder"] == str(folder)
    assert stage["library_bytes"] > 0
    assert stage["target"]["kind"] == "llvm"
    assert any("conv2d" in kernel and "relu" in kernel for kernel in stage["kernels"])
    assert json.loads((folder / "manifest.json").read_text())["model"] == "small"
    assert any((tmp_path / "dump").rglob("*.py"))


def test_what_was_compared_with_the_source(invoke, invoke_json, onnx_path, tmp_path):
    plan = tmp_path / "plan.json"
    invoke("plan", onnx_path, "--workers", "1", "--output", plan)
    arguments = ("compile", onnx_path, "--plan", plan, "--output", tmp_path / "bundle")
    assert invoke_json(*arguments)["verified"] == "yes"
    unverified = invoke_json(*arguments, "--no-verify")
    assert unverified["verified"] == "no"
    assert [stage["machine"] for stage in unverified["stages"]] == ["machine-a"]
    assert "--plan" in invoke(*arguments, "--stages", "2", code=2).stderr
    content = json.loads(plan.read_text())
    content["machines"][0]["target"] = {"kind": "llvm", "mattr": ["+avx512vnni", "+tbm"]}  # no processor has both
    plan.write_text(json.dumps(content))
    assert invoke_json(*arguments)["verified"] == "with stages compiled again for this host"
    words = " ".join(invoke(*arguments).stderr.split())
    assert "the code that stage_0 of machine-a will execute cannot run here and has not been run" in words


def test_run_on_workers(invoke_json, bundle, images, expected_outputs, tmp_path):
    path, values = images
    report = invoke_json("run", bundle, "--inputs", path, "--repeat", "2", "--output", tmp_path / "out.npz")
    assert (report["micro_batches"], report["events"]) == (6, [])
    assert report["blob_bytes_sent"] > 0
    assert all(report["weight_bytes"].values())
    assert [stage["micro_batches"] for stage in report["stages"]] == [6, 6]
    assert [stage["machine"] for stage in report["stages"]] == ["machine-a", "machine-b"]
    outputs = only_array(tmp_path / "out.npz")
    assert list(outputs.shape) == [6, *OUTPUT_SHAPE] == next(iter(report["output"]["shapes"].values()))
    np.testing.assert_allclose(outputs, expected_outputs([*values, *values]), rtol=1e-4, atol=1e-5)


def test_run_in_this_process(invoke, bundle, images, expected_outputs, tmp_path):
    path, values = images
    result = invoke("run", bundle, "--cluster", "in-process", "--inputs", path, "--output", tmp_path / "out.npz")
    assert "stage_1" in result.stdout
    assert "3 micro-batches" in result.stdout
    np.testing.assert_allclose(only_array(tmp_path / "out.npz"), expected_outputs(values), rtol=1e-4, atol=1e-5)


def test_run_a_model_at_once(invoke_json, onnx_path):
    report = invoke_json("run", onnx_path, "--cluster", "in-process", "--random", "2")
    assert (report["micro_batches"], report["inputs"], len(report["stages"])) == (2, "random", 1)


@pytest.mark.parametrize("arrays", [{"picture": np.zeros(INPUT_SHAPE)}, {"image": np.zeros((2, 3))}])
def test_wrong_inputs_are_refused_before_planning(invoke, onnx_path, tmp_path, arrays):
    np.savez(tmp_path / "wrong.npz", **{name: values.astype(np.float32) for name, values in arrays.items()})
    inputs = ("--inputs", tmp_path / "wrong.npz")
    for command in ("run", "bench"):
        error = invoke(command, onnx_path, *inputs, "--split", "machine-a=no_such_layer", code=2).stderr
        assert "wrong.npz" in error
        assert "no_such_layer" not in error


def test_a_bundle_for_machines_of_other_names(invoke, invoke_json, bundle, images, expected_outputs, tmp_path):
    path, values = images
    renamed = ("--rename", "machine-a=ta", "--rename", "machine-b=machine-a")
    report = invoke_json("run", bundle, *renamed, "--inputs", path, "--output", tmp_path / "out.npz")
    assert [stage["machine"] for stage in report["stages"]] == ["ta", "machine-a"]
    assert list(report["output"]["shapes"]) == ["scores"]
    np.testing.assert_allclose(only_array(tmp_path / "out.npz"), expected_outputs(values), rtol=1e-4, atol=1e-5)
    deployed = invoke("deploy", bundle, "--rename", "machine-a=ta").stdout
    assert "ta" in deployed
    assert "kB" in deployed
    for wrong, message in (("machine-a", "OLD=NEW"), ("desk=ta", "no machine 'desk'"), ("machine-a=machine-b", "both")):
        assert message in invoke("deploy", bundle, "--rename", wrong, code=2).stderr


@pytest.mark.parametrize("source", ["open.onnx", "network:plain", "network:example"])
def test_a_plan_keeps_its_sizes_and_fits_the_file_under_another_name(invoke, source, tmp_path, monkeypatch):
    model = small_model()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(model, tmp_path / "open.onnx")
    onnx.save(model, tmp_path / "copy.onnx")
    lines = ["import torch", "plain = torch.nn.Linear(4, 2)", "def example(): return plain, (torch.ones(1, 4),)"]
    (tmp_path / "network.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    sizes = ("--input-shape", "3,4") if source == "network:plain" else ("--batch", "3")
    invoke("plan", source, *sizes, "--workers", "1", "--stages", "1", "--output", "plan.json")
    invoke("compile", source.replace("open", "copy"), "--plan", "plan.json", "--output", "bundle")
    assert {tensor.shape[0] for tensor in tvm_split.Bundle.load("bundle").program.inputs} == {3}
    if source == "open.onnx":
        assert tvm_split.compile("copy.onnx", "plan.json", verify=False).program.inputs[0].shape[0] == 3


def test_threads_that_the_bundle_is_not_compiled_for_are_mentioned(invoke, bundle):
    for threads, is_mentioned in ((1, False), (2, True)):
        errors = invoke("run", bundle, "--cluster", "in-process", "--threads", threads, "--random", "1").stderr
        assert ("compiled for 1 thread" in errors) == is_mentioned


def test_other_wrong_use(invoke, bundle, tmp_path):
    assert "without a bundle" in invoke("run", tmp_path, code=2).stderr
    assert "'nope' is not a bundle's folder" in invoke("run", "nope", code=2).stderr
    assert "missing.npz" in invoke("run", "damaged", "--inputs", tmp_path / "missing.npz", code=2).stderr
    assert "planned and compiled already" in invoke("run", bundle, "--stages", "2", code=2).stderr
    assert "machine-b" in invoke("run", bundle, "--workers", "1", code=2).stderr


def test_a_bundle_for_machines_elsewhere_runs_nowhere_else_by_itself(invoke, invoke_json, onnx_path, tmp_path):
    """The bundle keeps their addresses, not their secrets."""
    machines = [
        {"name": name, "address": f"127.0.0.1:{port}", "target": {"kind": "llvm"}, "token_file": "token"}
        for name, port in (("desk", 8), ("box", 9))
    ]
    cluster, folder = tmp_path / "cluster.yaml", tmp_path / "bundle"
    cluster.write_text(json.dumps({"machines": machines}))
    (tmp_path / "token").write_text("open-sesame")
    split = ["--split", "desk=conv_1,relu_1", "--split", "box=conv_2,flatten,dense"]
    result = invoke("compile", onnx_path, "--cluster", cluster, "--output", folder, "--no-verify", *split)
    assert f"`tvm-split run {folder} --cluster {cluster}` runs it" in result.stderr
    assert "open-sesame" not in "".join(path.read_text() for path in folder.glob("manifest.*"))
    for command in ("run", "bench", "deploy"):
        error = invoke(command, folder, code=2).stderr
        assert "desk at 127.0.0.1:8, box at 127.0.0.1:9: give --cluster" in error
    unreached = invoke("run", folder, "--cluster", cluster, "--timeout", "1", code=1)
    assert "127.0.0.1:8" in unreached.stderr
    assert unreached.stdout == ""
    report = invoke_json("run", folder, "--workers", "2")
    assert [stage["machine"] for stage in report["stages"]] == ["desk", "box"]


def test_a_benchmark_as_json(invoke_json, bundle, tmp_path):
    np.savez(tmp_path / "images.npz", image=np.zeros((2, *INPUT_SHAPE), np.float32))
    options = ("--cluster", "in-process", "--rounds", "2", "--micro-batches", "5")
    report = invoke_json("bench", bundle, *options, "--inputs", tmp_path / "images.npz")
    assert (report["runs"], report["streamed"], report["rounds"]) == (10, 10, 2)
    assert [machine["stages"] for machine in report["machines"]] == [["stage_0"], ["stage_1"]]
    assert report["period_seconds"]["predicted"] is None
    assert report["latency_seconds"]["measured"] > 0
    assert report["inputs"] == str(tmp_path / "images.npz")


def test_rows_of_a_file_are_cut_and_joined(invoke_json, bundle, expected_outputs, tmp_path):
    rows, path = INPUT_SHAPE[0], tmp_path / "rows.npz"
    values = np.random.default_rng(7).standard_normal((5 * rows, *INPUT_SHAPE[1:])).astype(np.float32)
    np.savez(path, image=values)
    report = invoke_json("run", bundle, "--inputs", path, "--output", tmp_path / "out.npz")
    assert report["micro_batches"] == 5
    outputs = only_array(tmp_path / "out.npz")
    assert [list(outputs.shape)] == list(report["output"]["shapes"].values())
    np.testing.assert_allclose(outputs, np.concatenate(expected_outputs(values[:, None])), rtol=1e-4, atol=1e-5)
    assert invoke_json("bench", bundle, "--inputs", path, "--rounds", "1", "--micro-batches", "3")


def test_rows_that_cannot_be_cut_are_refused_before_planning(invoke, tmp_path, monkeypatch):
    (tmp_path / "mixing.py").write_text("import torch\ndef example(): return torch.nn.Softmax(0), (torch.ones(2, 4),)")
    np.savez(tmp_path / "rows.npz", np.ones((5, 4), np.float32))
    monkeypatch.chdir(tmp_path)
    inputs = ("--inputs", "rows.npz", "--split", "machine-a=no_such_layer")
    error = " ".join(invoke("run", "mixing:example", *inputs, code=2).stderr.split())
    for words in ("rows.npz", "[5, 4]", "[2, 4]", "relax.nn.softmax", "Give 2 rows"):
        assert words in error
    assert "no_such_layer" not in error
