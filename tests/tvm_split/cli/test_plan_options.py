"""``tvm-split plan`` with a search: constraints, estimates, sizes, problem files, and improving a plan that has run."""

import json

import onnx
import pytest

from tests.helpers.placement.bench_reports import report_of
from tests.models.small_onnx_model import small_model
from tvm_split.placement.plan import Plan
from tvm_split.placement.request import PlanRequest

A, B = "machine-a", "machine-b"
ROWS = f"conv_1..conv_2:rows:{A}=0.5,{B}=0.5"


@pytest.fixture
def planned(invoke_json, onnx_path):
    """Return a plan from estimates, which start no workers, as JSON."""
    return lambda *options: invoke_json("plan", onnx_path, "--estimate", *options)


def test_who_takes_the_stages_of_a_lost_machine(planned):
    prediction = planned("--workers", "3", "--stages", "2", "--fallback")["prediction"]
    assert {one["machine"] for one in prediction["fallbacks"]} == {A, B}
    assert all(one["destination"] and one["period_seconds"] > 0 for one in prediction["fallbacks"])


def test_every_demand_reaches_the_planner_and_the_plan_file(planned, tmp_path):
    options = (
        "--pin dense=machine-b --keep-off conv_1=machine-b --workers 3 --stages 2 --maximum-machines 2 --replicas "
    )
    options += (
        "--objective latency --maximum-latency 9 --minimum-throughput 0.1 --time-limit 5 --allow-lossy 0.01 --no-shards"
    )
    planned(*options.split(), "--output", tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").request == PlanRequest(
        objective="latency",
        stages=2,
        pin={"dense": (B,)},
        keep_off={"conv_1": (B,)},
        maximum_machines=2,
        replicas=True,
        maximum_latency_seconds=9,
        minimum_throughput=0.1,
        time_limit_seconds=5,
        allow_lossy=0.01,
        auto_shards=False,
        estimate=True,
    )


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


def test_sizes_of_micro_batches(invoke, invoke_json, tmp_path, monkeypatch):
    """Reading the weights takes as long for four samples as for one."""
    (tmp_path / "sized.py").write_text(
        "import torch\ndef example(): return torch.nn.Linear(500, 500), (torch.ones(1, 500),)"
    )
    monkeypatch.chdir(tmp_path)
    plan = ("plan", "sized:example", "--estimate", "--batches", "1,4")
    content = invoke_json(*plan)
    fast, slow = content["sizes"]
    assert (fast["size"], slow["size"], content["inputs"][0]["shape"][0]) == (4, 1, 4)
    assert fast["samples_per_second"] > 1.5 * slow["samples_per_second"]
    assert "samples/s" in invoke(*plan).stdout
    quick, late = invoke_json(*plan, "--objective", "latency")["sizes"]
    assert (quick["size"], late["size"]) == (1, 4)
    between = (quick["latency_seconds"] + late["latency_seconds"]) / 2
    limited = invoke(*plan, "--maximum-latency", between, "--json")
    assert [size["size"] for size in json.loads(limited.stdout)["sizes"]] == [1]
    assert "micro-batches of 4: no plan fits" in limited.stderr
    assert "a split by hand has no prediction" in invoke(*plan[:2], *plan[3:], "--cluster", "in-process", code=2).stderr


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
    assert "the plan stays" in invoke(*improve, plan, "--threshold", "1").stderr


def test_files_that_are_none_to_replan_by(invoke, invoke_json, onnx_path, tmp_path):
    plan, report, neither = (tmp_path / name for name in ("plan.json", "report.json", "neither.json"))
    first = invoke_json("plan", onnx_path, "--estimate", "--output", plan)
    report.write_text(json.dumps(report_of(first["plan"], {first["stages"][0]["machine"]: 1e4})))
    neither.write_text("{}")
    by_hand = json.loads(report.read_text())
    for machine in by_hand["machines"]:
        machine["compute_seconds"]["predicted"] = None
    unpredicted = tmp_path / "unpredicted.json"
    unpredicted.write_text(json.dumps(by_hand))
    for files, message in (
        ((report, plan), f"{report} is no plan, which `tvm-split plan --output` writes: it should say format"),
        ((neither, report), f"{neither} is no plan, which `tvm-split plan --output` writes: it should say format"),
        ((plan, unpredicted), "had no prediction; make one with `tvm-split plan`, of a split by hand with --predict"),
        ((plan, neither), f"{neither} is not a report of `tvm-split bench --json`"),
    ):
        error = invoke("replan", onnx_path, "--estimate", "--plan", files[0], "--measured", files[1], code=2).stderr
        assert message in error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pin", "conv_1"], "--pin: 'conv_1' is not LAYER=MACHINE"),
        (["--maximum-machines", "0"], "--maximum-machines"),
        (["--refresh"], "--estimate, --refresh: an estimate measures nothing"),
        (["--batches", "1,two"], "--batches: '1,two' is not a list of numbers"),
        *((["--batches", sizes], "different whole numbers") for sizes in ("2,2", "0,1", "-1")),
        (["--batches", "1,2", "--batch", "2"], "--batch, --batches"),
        (["--batches", "1,2", "--write-problem", "p.json"], "--batches, --write-problem"),
        (["--split", "machine-a=conv_1", "--replicas"], "a split by hand leaves nothing to search"),
        (["--split", "machine-a=conv_1", "--split", "machine-b=conv_9"], "'conv_9'"),
        (["--split", "conv_1"], "MACHINE=LAYER"),
        (["--cluster", "no.yaml", "--workers", "2"], "--workers"),
        (["--dimension", "batch"], "NAME=SIZE"),
        (["--input-shape", "1,2"], "--batch or"),
        (["--predict"], "--predict: belongs to a split or shards"),
        (["--shard", ROWS, "--no-shards"], "--no-shards: a split by hand leaves nothing to search"),
        (["--shard", ROWS, "--write-annotations", "annotated.onnx"], "machine-a, machine-b compute stage_0 together"),
        (["--plan", "plan.json"], "--measured"),
        (["--measured", "report.json"], "--plan"),
        (["--plan", "no.json", "--measured", "no.json"], "cannot read no.json"),
        (["--plan", "p.json", "--measured", "r.json", "--refresh"], "--refresh: new measurements need no correction"),
        (["--plan", "p.json", "--measured", "r.json", "--split", "machine-a=conv_1"], "--split: "),
        (["--plan", "p.json", "--measured", "r.json", "--batches", "1,2"], "--batches"),
    ],
)
def test_wrong_use(invoke, onnx_path, options, message):
    command = "replan" if {"--plan", "--measured"} & set(options) else "plan"
    result = invoke(command, onnx_path, *([] if command == "replan" else ["--estimate"]), *options, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_no_plan_that_fits_is_a_failure_and_no_wrong_use(invoke, onnx_path):
    for options in (["--maximum-latency", "1e-9"], ["--maximum-latency", "1e-9", "--batches", "2"]):
        result = invoke("plan", onnx_path, "--workers", "2", "--estimate", *options, code=1)
        assert "latency" in result.stderr


def test_all_open_axes_at_once_in_the_words_of_the_command_line(invoke, open_batch, tmp_path):
    model = onnx.load(open_batch)
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
