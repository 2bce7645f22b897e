"""The demonstration as a user runs it. Slow: training, compiling and three processes take about 15 seconds."""

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from tvm_split.__main__ import main; main()", "demo"]


@pytest.fixture(scope="module")
def demo_result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    ended = subprocess.run(
        [*COMMAND, "--json", "--output", str(folder)], capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder, json.loads(ended.stdout)


def test_the_answers_are_those_of_before_the_split(demo_result):
    _, report = demo_result
    assert report["accuracy_unsplit"] == report["accuracy_split"] > 0.95
    assert report["largest_difference"] <= 1e-5
    assert report["gain"] == pytest.approx(report["one_by_one_seconds"] / report["pipelined_seconds"])
    assert report["one_worker_seconds"] > 0
    assert report["test_images"] == report["micro_batches"] * report["micro_batch_images"]


def test_the_machines_have_their_layers(demo_result):
    _, report = demo_result
    assert {stage["machine"]: stage["layers"] for stage in report["compiled"]} == {
        "machine-a": ["conv1", "relu1"],
        "machine-b": ["conv2", "relu2"],
        "machine-c": ["flatten", "fc1", "relu3", "fc2"],
    }
    assert any("conv2d" in kernel and "relu" in kernel for kernel in report["compiled"][0]["kernels"])
    assert [stage["machine"] for stage in report["stages"]] == ["machine-a", "machine-b", "machine-c"]
    assert all(stage["compute_seconds"] > 0 for stage in report["stages"])


def test_the_files_are_there(demo_result):
    folder, report = demo_result
    assert "<svg" in (folder / "timeline.svg").read_text()
    assert "machine-c  receive" in (folder / "timeline.txt").read_text()
    assert json.loads((folder / "report.json").read_text()) == report
    for machine in ("machine-a", "machine-b", "machine-c"):
        text = (folder / "bundle" / "ir" / f"{machine}.py").read_text()
        assert "tvm_split.receive" in text
        assert "tvm_split.send" in text


@pytest.mark.slow
def test_a_stream_is_complete_though_a_machine_dies(tmp_path):
    command = [*COMMAND, "--kill", "--workers", "2", "--json", "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    recovered = json.loads(ended.stdout)["recovered"]  # results that are missing or differ are an error
    assert recovered["machine"] == "machine-b"
    assert {machine for machines in recovered["placement"].values() for machine in machines} == {"machine-a"}


@pytest.mark.slow
def test_all_machines_compute_each_layer_together(tmp_path):
    ended = subprocess.run(
        [*COMMAND, "--shard", "--workers", "2", "--json", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["accuracy_unsplit"] == report["accuracy_split"] > 0.95
    layers = {
        machine: {layer for stage in report["compiled"] if stage["machine"] == machine for layer in stage["layers"]}
        for machine in ("machine-a", "machine-b")
    }
    assert (
        layers["machine-a"]
        == layers["machine-b"]
        == {"conv1", "relu1", "conv2", "relu2", "flatten", "fc1", "relu3", "fc2"}
    )
    assert "_halo_for_machine_b" in (tmp_path / "bundle" / "ir" / "machine-a.py").read_text()
