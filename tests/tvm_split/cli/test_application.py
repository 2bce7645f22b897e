"""What all commands have in common: help, start-up, exit codes, signals."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvm_split
from tests.helpers.waiting import eventually, wait_while_running

COMMANDS = ("demo", "plan", "compile", "tune", "worker", "deploy", "run", "status", "doctor")
COMPILE = ["compile", "--split", "machine-a=conv_0", "--split", "machine-b=conv_1", "--no-verify"]
HEAVY = ("tvm", "torch", "onnx", "numpy", "grpc", "pydantic", "matplotlib")


def test_help_lists_all_commands(invoke):
    text = invoke("--help").stdout
    assert all(f" {command} " in text for command in COMMANDS)
    assert "Exit codes" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(invoke, command):
    text = invoke(command, "-h").stdout
    assert f"tvm-split {command}" in text.replace("root", "tvm-split")
    assert "--json" in text


def test_version(invoke):
    assert invoke("--version").stdout.strip() == tvm_split.__version__


def test_as_a_module():
    command = [sys.executable, "-m", "tvm_split", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == tvm_split.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bake"], "No such command"),
        (["plan"], "Missing argument"),
        (["run", "x.onnx", "--random", "0"], "--random"),
        (["run", "x.onnx", "--random", "2", "--inputs", "a.npz"], "give one of them"),
        (["status"], "name the workers to ask"),
        (["worker", "--tls-ca", "ca.pem"], "--tls-ca needs"),
        (["demo", "--workers", "9"], "--workers"),
    ],
)
def test_wrong_use_is_2_and_said_on_stderr(invoke, arguments, message):
    result = invoke(*arguments, code=2)
    assert message in result.stderr
    assert result.stdout == ""


def test_commands_are_loaded_without_what_they_need_when_they_run():
    code = "import sys, tvm_split.cli.application; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(HEAVY) & set(modules)


def test_debug_shows_where(start_process):
    for shown, process in (
        (True, start_process("plan", "missing:name", env={**os.environ, "TVM_SPLIT_DEBUG": "1"})),
        (False, start_process("plan", "missing:name")),
    ):
        _, errors = process.communicate(timeout=60)
        assert ("Traceback" in errors) == shown
        assert errors.splitlines()[-1] == "error: MODEL: cannot import 'missing': No module named 'missing'"
        assert process.returncode == 2


def test_a_reader_that_leaves_early_is_no_error_message(start_process):
    process = start_process("--help")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 1
    assert errors == ""


def test_a_full_disk_is_one_sentence():
    command = [sys.executable, "-m", "tvm_split", "cache", "show", "--json"]
    with open("/dev/full", "w") as full:  # noqa: PTH123  (a device)
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "error: the result cannot be written: No space left on device; make room, or write it elsewhere"
    ]


@pytest.mark.parametrize("option", ["plan --output", "plan --write-problem", "plan --picture", "run --output"])
def test_a_file_on_a_full_disk_is_named(invoke, onnx_path, bundle, tmp_path, option):
    full = tmp_path / "full.svg"
    full.symlink_to("/dev/full")
    command, name = option.split()
    source = [onnx_path, "--estimate"] if command == "plan" else [bundle]
    result = invoke(command, *source, "--cluster", "in-process", name, full, code=1)
    text = f"error: {full} cannot be written: No space left on device; make room, or write it elsewhere"
    assert result.stderr.splitlines()[-1] == text


@pytest.mark.parametrize("name", ["schedules", "relay_passes", "rpc_runtime"])
def test_a_file_that_hides_a_package_of_ours_is_named(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-c", "import tvm_split"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tvm_split.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"'{tmp_path / name}.py' hides the package '{name}' of tvm-split: rename that file" in ended.stderr


def test_a_signal_ends_a_run_and_its_workers(start_process, bundle, tmp_path):
    process = start_process(
        "run", bundle, "--random", "1", "--repeat", "10000000", env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    workers = wait_while_running(
        process, lambda: len(children := psutil.Process(process.pid).children()) == 2 and children
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "number", "code", "word"),
    [
        (COMPILE, signal.SIGTERM, 143, "terminated"),
        (["plan"], signal.SIGINT, 130, "interrupted"),
    ],
    ids=["compile, SIGTERM", "plan, Ctrl-C"],
)
def test_a_signal_ends_a_command_that_is_deep_inside_of_tvm(start_process, tmp_path, command, number, code, word):
    """In TVM, no Python code runs for a long time, and an exception in a callback becomes an error of TVM's own."""
    onnx.save(deep_model(), tmp_path / "deep.onnx")
    (tmp_path / "scratch").mkdir()
    process = start_process(
        *(*command, tmp_path / "deep.onnx", "--output", tmp_path / "written"),
        env={
            **os.environ,
            "TMPDIR": str(tmp_path / "scratch"),
            "TVM_SPLIT_CACHE": str(tmp_path / "cache"),
            "TVM_SPLIT_PROGRESS": "0",
        },
    )
    wait_while_running(process, lambda: list((tmp_path / "scratch").glob("*-build-*")))
    time.sleep(0.5)
    process.send_signal(number)
    started = time.monotonic()
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (code, "", f"{word}\n")
    assert time.monotonic() - started < 5
    # A compiler that is running still ends, and removes its files.
    eventually(lambda: not list((tmp_path / "scratch").iterdir()), "no scratch folder is left")
    assert not (tmp_path / "written").exists()


def deep_model() -> onnx.ModelProto:
    """Convolutions of many shapes, which take much longer to compile than a test should."""
    channels = [16 + 8 * (index % 7) + index for index in range(61)]
    weights = [
        numpy_helper.from_array(np.zeros((after, before, 3, 3), np.float32), f"w{index}")
        for index, (before, after) in enumerate(itertools.pairwise(channels))
    ]
    nodes = [
        helper.make_node("Conv", [f"x{index}", f"w{index}"], [f"x{index + 1}"], name=f"conv_{index}", pads=[1] * 4)
        for index in range(len(weights))
    ]
    ends = [
        helper.make_tensor_value_info(f"x{index}", TensorProto.FLOAT, [1, channels[index], 56, 56])
        for index in (0, len(weights))
    ]
    graph = helper.make_graph(nodes, "deep", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
