"""``tvm-split tune`` on this machine; with a tracker it is tested in tests/integration/test_tuning.py."""

import json
import os
import signal

import numpy as np
import onnx
import psutil
import pytest

from schedules.tuning.database import RECORDS, DatabaseWriter
from tests.helpers.frontends.onnx_cases import node_model
from tests.helpers.full_disk import full_disk
from tests.helpers.waiting import PATIENCE_SECONDS, wait_while_running


@pytest.mark.slow
def test_list_tune_resume_compile(invoke_json, invoke, onnx_path, tmp_path):
    folder = tmp_path / "tuned"
    listed = invoke_json("tune", onnx_path, "--trials", "0", "--database", folder)
    shares = sum(kernel["share"] for kernel in listed["kernels"])
    assert 0 < listed["fixed_seconds"] < listed["default_seconds"]
    assert shares + listed["fixed_seconds"] / listed["default_seconds"] == pytest.approx(1.0)
    assert not listed["unmeasured"]
    assert {kernel["template"] for kernel in listed["kernels"]} <= {"conv2d", "matmul"}
    count = len(listed["kernels"])
    assert listed["trials"] == count
    tuned = invoke_json("tune", onnx_path, "--trials", count + 2, "--database", folder)
    assert tuned["trials"] == count + 2
    assert tuned["tuned_seconds"] <= tuned["default_seconds"]
    again = invoke_json("tune", onnx_path, "--trials", count + 2, "--database", folder)
    assert again["trials"] == count + 2
    options = ("--workers", "1", "--database", folder)
    invoke("compile", onnx_path, *options, "--output", tmp_path / "bundle")
    merged = invoke_json("tune", "--merge", folder, "--database", tmp_path / "mine")
    assert merged["records"] >= count + 2
    assert "0 records" in invoke("tune", "--merge", folder, "--database", tmp_path / "mine").stdout


def test_wrong_use(invoke, onnx_path, tmp_path):
    assert "MODEL" in invoke("tune", code=2).stderr
    assert "--merge" in invoke("tune", onnx_path, "--merge", tmp_path, code=2).stderr
    assert "is not JSON" in invoke("tune", onnx_path, "--target", "{llvm", code=2).stderr
    assert "without a key" in invoke("tune", onnx_path, "--tracker", "127.0.0.1:1", code=2).stderr
    target = json.dumps({"kind": "cuda", "arch": "sm_90"})
    # The error comes before the model is read; there is none here.
    nothing = tmp_path / "nothing.onnx"
    assert "measured through a tracker alone" in invoke("tune", nothing, "--target", target, code=1).stderr
    missing = invoke("compile", onnx_path, "--database", tmp_path / "none", "--output", tmp_path / "b", code=1)
    assert "no tuning database" in missing.stderr


def test_a_database_that_cannot_be_written_is_told_before_the_model_is_read(invoke, tmp_path):
    command = ("tune", tmp_path / "nothing.onnx", "--database")
    with DatabaseWriter(tmp_path / "tuned"):
        assert "another process writes to" in invoke(*command, tmp_path / "tuned", code=1).stderr
    (tmp_path / "file").touch()
    assert f"cannot write the tuning database {tmp_path}/file" in invoke(*command, tmp_path / "file", code=1).stderr


def test_a_merge_on_a_full_disk_names_the_file(invoke, tmp_path):
    record = {"kernel": "0" * 16, "target": ["llvm"], "choices": "a", "rounds": [1.0], "is_decision": True}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / RECORDS).write_text(json.dumps(record) + "\n")
    with full_disk():
        error = invoke("tune", "--merge", tmp_path / "theirs", "--database", tmp_path / "mine", code=1).stderr
    assert f"cannot write {tmp_path}/mine/{RECORDS}: File too large; make room" in error


@pytest.mark.slow
@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_to_all_processes_keeps_what_was_measured(start_process, onnx_path, tmp_path, number, word):
    """A terminal sends Ctrl-C to the whole process group: builders and measurements, too."""
    temporary, folder = tmp_path / "temporary", tmp_path / "tuned"
    temporary.mkdir()
    options = {"env": {**os.environ, "TMPDIR": str(temporary), "TVM_SPLIT_PROGRESS": "0"}, "start_new_session": True}
    process = start_process("tune", onnx_path, "--trials", "100000", "--database", folder, **options)
    records = folder / RECORDS
    wait_while_running(process, lambda: records.exists() and len(records.read_text().splitlines()) > 4)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, output, errors) == (128 + number, "", f"{word}\n")
    assert not psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1]
    assert not list(temporary.iterdir())
    trials = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(trials) > 4
    assert all(trial["rounds"] for trial in trials), "an interrupted measurement is no failed one"


def test_every_kernel_with_its_layers(invoke_json, onnx_path):
    profile = invoke_json("profile", onnx_path, "--threads", "1", "--rounds", "2")
    layers = [layer for kernel in profile["kernels"] for layer in kernel["layers"]]
    assert {"conv_1", "relu_1", "conv_2", "dense"} <= set(layers)
    assert profile["threads"] == 1
    shares = sum(kernel["share_of_time"] for kernel in profile["kernels"])
    assert shares + profile["other_seconds"] / profile["seconds"] == pytest.approx(1.0)
    assert all(kernel["seconds"] > 0 for kernel in profile["kernels"])
    assert min(profile["peaks"]["operations_per_second"], profile["peaks"]["bytes_per_second"]) > 0
    firsts = [kernel["layers"][0] for kernel in profile["kernels"] if kernel["layers"]]
    assert firsts.index("conv_1") < firsts.index("conv_2") < firsts.index("dense")


def test_a_network_without_a_kernel(invoke, invoke_json, tmp_path):
    onnx.save(node_model("Identity", [np.ones(4, np.float32)]), tmp_path / "same.onnx")
    assert invoke_json("profile", tmp_path / "same.onnx", "--threads", "1", "--rounds", "1")["kernels"] == []
    invoke("profile", tmp_path / "same.onnx", "--threads", "1", "--rounds", "1")


def test_indices_cannot_be_made_up(invoke, tmp_path):
    words, table = np.ones(4, np.int64), np.ones((5, 3), np.float32)
    onnx.save(node_model("Gather", [table, words]), tmp_path / "w.onnx")
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
