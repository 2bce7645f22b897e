"""What all commands have in common: help, start-up, exit codes, signals."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import tvm_split
from tests.helpers.waiting import wait_while_running

COMMANDS = ("demo", "plan", "compile", "tune", "worker", "deploy", "run", "status", "doctor")
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bake"], "No such command"),
        (["plan"], "Missing argument"),
        (["run", "x.onnx", "--random", "0"], "--random"),
        (["run", "x.onnx", "--random", "2", "--inputs", "a.npz"], "give one of them"),
        (["status"], "give one of them"),
        (["worker", "--tls-ca", "ca.pem"], "--tls-ca: needs"),
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
        (True, start_process("--debug", "plan", "missing:name")),
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_and_its_workers(start_process, bundle, tmp_path, number, code):
    process = start_process(
        "run", bundle, "--random", "1", "--repeat", "10000000", env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    workers = wait_while_running(process, lambda: len(found := psutil.Process(process.pid).children()) == 2 and found)
    time.sleep(1.0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers)
    assert list(tmp_path.iterdir()) == []
