"""``tvm-split plan`` with a search: constraints, estimates, sizes, problem files, and improving a plan that has run."""

import json

import onnx
import pytest

from tests.helpers.planner.bench_reports import report_of
from tests.models.small_onnx_model import small_model
from tvm_split.planner.plan import Plan

A, B = "machine-a", "machine-b"


@pytest.fixture
def planned(invoke_json, onnx_path):
    """Return a plan from estimates, which start no workers, as JSON."""
    return lambda *options: invoke_json("plan", onnx_path, "--estimate", *options)


def on(content, machine):
    return [layer for stage in content["plan"]["stages"] if stage["machines"] == [machine] for layer in stage["layers"]]


def test_pins(planned):
    assert on(planned("--pin", "dense=machine-b"), B)[-1] == "dense"
    content = planned("--pin", "conv_1=machine-b", "--keep-off", "dense=machine-b")
    assert (on(content, B)[0], on(content, A)[-1]) == ("conv_1", "dense")


def test_numbers_and_limits(planned, invoke, onnx_path):
    assert len(planned("--workers", "3", "--stages", "3")["stages"]) == 3
    assert len(planned("--maximum-machines", "1")["stages"]) == 1
    free = planned()["prediction"]
    assert planned("--maximum-latency", str(free["latency_seconds"] * 1.01))["prediction"]["latency_seconds"] > 0
    rate = free["samples_per_second"]
    prediction = planned("--objective", "latency", "--minimum-throughput", str(rate * 0.9))["prediction"]
    assert prediction["samples_per_second"] >= rate * 0.9
    for option, value in (("--maximum-latency", "1e-8"), ("--minimum-throughput", "1e12")):
        assert "no plan" in invoke("plan", onnx_path, "--estimate", option, value, code=2).stderr


def test_replicas(invoke, invoke_json, tmp_path, monkeypatch):
    (tmp_path / "wide.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = (torch.nn.Linear(512, 512) for _ in range(3))\n"
        "    return torch.nn.Sequential(*layers), (torch.zeros(128, 512),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("plan", "wide:make", "--estimate", "--replicas")
    content = invoke_json(*options)
    assert [len(stage["layers"]) for stage in content["stages"]] == [3]
    (stage,) = content["plan"]["stages"]
    assert (stage["machines"], stage["shares"]) == ([A, B], [0.5, 0.5])
    assert "takes turns" in invoke(*options).stdout
    pinned = invoke_json(*options, "--pin", "0=machine-a")
    assert len(pinned["plan"]["stages"][0]["machines"]) == 1  # a pinned layer is on its machine alone


def test_estimates_are_called_estimates(planned):
    content = planned()
    assert content["plan"]["origin"] == "estimated"
    assert [machine["estimated_share"] for machine in content["prediction"]["machines"]] == [1.0]
    assert content["prediction"]["profiled_at"] == 0


def test_a_written_problem_has_the_same_plan(planned, invoke_json, tmp_path):
    path = tmp_path / "problem.json"
    demands = ("--stages", "2", "--pin", "conv_1=machine-b", "--maximum-latency", "0.5")
    content = planned(*demands, "--write-problem", path)
    alone = invoke_json("solve", path)
    assert [stage["machine"] for stage in alone["stages"]] == [stage["machine"] for stage in content["stages"]]
    for solved, planned_stage in zip(alone["stages"], content["plan"]["stages"], strict=True):
        assert solved["pieces"] == planned_stage["layers"]  # from estimates, every layer is a piece
    assert alone["predicted"]["period_seconds"] == pytest.approx(content["prediction"]["period_seconds"])
    assert alone["predicted"]["latency_seconds"] == pytest.approx(content["prediction"]["latency_seconds"])
    assert alone["lower_bound_seconds"] == pytest.approx(content["prediction"]["lower_bound_seconds"])


@pytest.fixture(scope="module")
def open_batch(tmp_path_factory):
    """The small network with an open number of images."""
    model = small_model()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "images"
    path = tmp_path_factory.mktemp("open") / "small.onnx"
    onnx.save(model, path)
    return path


def test_sizes_of_micro_batches(invoke, invoke_json, open_batch):
    content = invoke_json("plan", open_batch, "--estimate", "--batches", "1,4")
    assert sorted(size["size"] for size in content["sizes"]) == [1, 4]
    rates = [size["samples_per_second"] for size in content["sizes"]]
    assert rates == sorted(rates, reverse=True)
    assert content["inputs"][0]["shape"][0] == content["sizes"][0]["size"]
    assert "samples a second" in invoke("plan", open_batch, "--estimate", "--batches", "1,4").stdout


def test_what_codecs_may_change_reaches_the_planner(invoke, onnx_path, tmp_path):
    invoke("plan", onnx_path, "--estimate", "--allow-lossy", "0.01", "--output", tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").request.allow_lossy == 0.01
    invoke("plan", onnx_path, "--estimate", "--allow-lossy", "-1", code=2)


def test_replanning(invoke, invoke_json, onnx_path, tmp_path):
    plan, report, better = (tmp_path / name for name in ("plan.json", "report.json", "better.json"))
    options = ("--estimate", "--objective", "latency")
    first = invoke_json("plan", onnx_path, *options, "--output", plan)
    (machine,) = (stage["machine"] for stage in first["stages"])
    other_machine = {A: B, B: A}[machine]
    report.write_text(json.dumps(report_of(first["plan"], {machine: 1e4})))
    improve = ("replan", onnx_path, "--measured", report, "--plan")
    result = invoke(*improve, plan, "--output", better)
    assert "the plan changes: it gains" in result.stderr
    written = json.loads(better.read_text())
    assert [stage["machines"] for stage in written["stages"]] == [[other_machine]]
    assert written["origin"] == "corrected by measurements"
    assert "the plan stays" in invoke(*improve, better).stderr
    # The new plan runs as predicted. That its machine is as fast as expected does not make the other one fast again.
    report.write_text(json.dumps(report_of(written, {other_machine: 1.0})))
    assert "the plan stays" in invoke(*improve, better).stderr
    report.write_text(json.dumps(report_of(first["plan"], {machine: 1e4})))
    assert "the plan stays" in invoke(*improve, plan, "--threshold", "1").stderr


def test_files_that_are_none_to_replan_by(invoke, invoke_json, onnx_path, tmp_path):
    plan, report, neither = (tmp_path / name for name in ("plan.json", "report.json", "neither.json"))
    first = invoke_json("plan", onnx_path, "--estimate", "--output", plan)
    report.write_text(json.dumps(report_of(first["plan"], {first["stages"][0]["machine"]: 1e4})))
    neither.write_text("{}")
    swapped = f"--plan, --measured: {plan} is the plan, and {report} is none; give --plan {plan} --measured {report}"
    for files, message in (
        ((report, plan), swapped),
        ((neither, report), f"{neither} is no plan, which `tvm-split plan --output` writes: it should say format"),
        ((plan, neither), f"{neither} is no report, which `tvm-split bench --json` writes"),
    ):
        error = invoke("replan", onnx_path, "--estimate", "--plan", files[0], "--measured", files[1], code=2).stderr
        assert message in error
        assert "Traceback" not in error


@pytest.mark.slow
def test_a_bench_report_improves_the_plan_that_was_measured(invoke, invoke_json, onnx_path, tmp_path):
    plan, report, bundle = (tmp_path / name for name in ("plan.json", "report.json", "bundle"))
    invoke("plan", onnx_path, "--stages", "2", "--output", plan)
    invoke("compile", onnx_path, "--plan", plan, "--output", bundle, "--no-verify")
    report.write_text(invoke("bench", bundle, "--rounds", "1", "--micro-batches", "10", "--json").stdout)
    result = invoke("replan", onnx_path, "--plan", plan, "--measured", report)
    assert "the plan " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_file_keeps_the_sizes_of_the_inputs_and_what_was_asked(invoke, invoke_json, open_batch, tmp_path):
    """Neither has to be given again."""
    plan = tmp_path / "plan.json"
    invoke("plan", open_batch, "--estimate", "--batch", "3", "--pin", "dense=machine-b", "--output", plan)
    saved = Plan.load(plan)
    assert (saved.request.estimate, saved.request.pin, saved.inputs[0].shape[0]) == (True, {"dense": (B,)}, 3)
    invoke("compile", open_batch, "--plan", plan, "--output", tmp_path / "bundle", "--no-verify")
    bundle = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert bundle["program"]["inputs"][0]["shape"][0] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pin", "conv_1"], "--pin: 'conv_1' is not LAYER=MACHINE"),
        (["--keep-off", "=machine-a"], "--keep-off"),
        (["--pin", "conv_9=machine-a"], "'conv_9'"),
        (["--pin", "conv_1=machine-z"], "'machine-z'; the cluster has machine-a, machine-b"),
        (["--pin", "conv_1=machine-a", "--keep-off", "conv_1=machine-a"], "conv_1"),
        (["--maximum-machines", "0"], "--maximum-machines"),
        (["--maximum-latency", "-1"], "--maximum-latency"),
        (["--minimum-throughput", "0"], "--minimum-throughput"),
        (["--time-limit", "0"], "--time-limit"),
        (["--refresh"], "--estimate, --refresh: an estimate measures nothing"),
        (["--batches", "1,two"], "--batches: '1,two' is no list of numbers"),
        (["--batches", "2,2"], "different whole numbers"),
        (["--batches", "1,2", "--batch", "2"], "--batch, --batches"),
        (["--batches", "1,2", "--write-problem", "p.json"], "--batches, --write-problem"),
        (["--split", "machine-a=conv_1", "--replicas"], "a split by hand leaves nothing to search"),
        (["--stages", "3", "--pin", "conv_1=machine-a"], "3 stages on 2 machines go round"),
    ],
)
def test_wrong_use(invoke, onnx_path, options, message):
    result = invoke("plan", onnx_path, "--estimate", *options, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan", "plan.json"], "--measured"),
        (["--measured", "report.json"], "--plan"),
        (["--plan", "no.json", "--measured", "no.json"], "cannot read no.json"),
        (["--plan", "p.json", "--measured", "r.json", "--refresh"], "--refresh: new measurements need no correction"),
        (["--plan", "p.json", "--measured", "r.json", "--split", "machine-a=conv_1"], "--split: "),
        (["--plan", "p.json", "--measured", "r.json", "--batches", "1,2"], "--batches"),
    ],
)
def test_wrong_use_of_replan(invoke, onnx_path, options, message):
    result = invoke("replan", onnx_path, *options, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_all_open_axes_at_once_in_the_words_of_the_command_line(invoke, tmp_path):
    model = small_model()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "images"
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(model, tmp_path / "open.onnx")
    text = invoke("plan", tmp_path / "open.onnx", "--estimate", code=1).stderr
    assert "axis 0 of input 'image' ('images'), axis 2 of input 'image' ('height')" in text
    assert "for example --batch 1 --dimension height=128" in text
    assert "batch=" not in text
    assert "None" not in text


@pytest.mark.parametrize("command", [["plan"], ["compile", "--output", "bundle"], ["run"], ["bench"]])
def test_tuned_kernels_count_for_what_is_measured(invoke, onnx_path, tmp_path, monkeypatch, command):
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path / "cache"))
    name, *options = command
    error = invoke(name, onnx_path, *options, "--database", tmp_path / "none", code=1).stderr
    assert "no tuning database" in error
    assert not (tmp_path / "cache").exists()  # it is opened before anything is measured
