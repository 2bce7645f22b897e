"""Standard output of a command is only its result, whatever libraries write there: programs read ``--json``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import tvm_split
from tests.helpers.frontends.onnx_cases import node_model
from tests.helpers.labs import write_lab
from tests.helpers.placement.bench_reports import report_of
from tests.helpers.placement.problems import GOOD
from tests.helpers.rpc_runtime.worker_process import ROOT
from tvm_split.cli.application import app, loaded, registry
from tvm_split.ssh.ssh_worker import SSH_VARIABLE

NOISE = "a library writes to descriptor 1"
COMMAND = "from tvm_split.__main__ import main; main()"
NOISY_MODEL = f"""
import ctypes
import torch

ctypes.CDLL(None).puts(b"{NOISE}")  # from C's own buffer
print("{NOISE}, from Python")
torch.__version__ = "2.99.0"
Network = torch.nn.ReLU
"""


NOISY_COMMAND = f"""
import os, sys

def write(event, arguments, written=[]):
    if event == "import" and not written and hasattr(sys.modules.get("tvm_split.cli.application"), "run_application"):
        written.append(os.write(1, b"{NOISE}\\n"))

sys.addaudithook(write)
{COMMAND}
"""
"""After the command line is loaded, the first module that the command imports stands for the library."""
ELSEWHERE = {"demo"}
"""Takes many seconds; tests/tvm_split/demo/test_demo.py reads its ``--json`` from a process."""
IN_SHORT = {"compile", "run", "status"}
"""Commands that compile, compute and call workers."""
COMMANDS = {
    name for name, row in registry.items() if any("--json" in parameter.opts for parameter in loaded(row).params)
}


SSH_ON_THIS_HOST = """#!/bin/sh
for remote do :; done
exec sh -c "$remote"
"""
"""Runs the last argument of ssh, without another machine."""


def ended(code: str, *arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with separate standard output and standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(cwd))), **variables}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def arguments(onnx_path, bundle, three_workers, tmp_path_factory):
    """Yield arguments for each command with which it ends soon."""
    folder = tmp_path_factory.mktemp("files")
    problem, plan, report, cluster = (folder / name for name in ("problem.json", "plan.json", "report.json", "c.yaml"))
    problem.write_text(GOOD)
    activation = folder / "activation.onnx"
    onnx.save(node_model("Relu", [np.ones((1, 4), np.float32)]), activation)  # no kernel of it is tuned
    planned = CliRunner().invoke(app, ["plan", str(onnx_path), "--estimate", "--output", str(plan)])
    assert planned.exit_code == 0, planned.output
    report.write_text(json.dumps(report_of(json.loads(plan.read_text()), {"machine-a": 1.0})))
    ssh = {"to": "box", "folder": str(folder / "remote"), "python": sys.executable}
    machine = {"name": "box", "address": "127.0.0.1:9", "token_file": "token", "ssh": ssh}
    cluster.write_text(json.dumps({"machines": [machine]}))
    (folder / "token").write_text("open-sesame")
    trace, lab = folder / "trace.json", write_lab(folder, three_workers.endpoints())
    commands = {
        "report": (trace,),
        "trace": ("--cluster", lab, "--seconds", "0.2"),
        "plan": (onnx_path, "--estimate"),
        "replan": (onnx_path, "--estimate", "--plan", plan, "--measured", report),
        "solve": (problem,),
        "simulate": (plan,),
        "compile": (onnx_path, "--workers", "1", "--no-verify", "--output", folder / "bundle"),
        "tune": (activation, "--trials", "0", "--database", folder / "tuned"),
        "worker-kit": (folder / "kit",),
        "down": (cluster,),
        "deploy": (bundle,),
        "run": (bundle, "--cluster", "in-process", "--random", "1"),
        "bench": (bundle, "--cluster", "in-process", "--rounds", "1", "--micro-batches", "3"),
        "profile": (onnx_path, "--threads", "1", "--rounds", "1"),
        "cache": ("show",),
        "status": ("--cluster", cluster, "--timeout", "1"),
        "drain": ("machine-a", "--cluster", "local:1"),
        "doctor": (),
        "certs": (folder / "lab", "--client", "me"),
        "token": ("me",),
    }
    with tvm_split.deploy(bundle, lab) as running:
        running.run(*(np.zeros(tensor.shape, tensor.dtype) for tensor in running.program.inputs))
        running.trace().save(trace)
        yield commands


@pytest.mark.parametrize(
    "command",
    [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.slow) for name in sorted(COMMANDS - ELSEWHERE)],
)
def test_stdout_is_json_whatever_libraries_write(arguments, command, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH_ON_THIS_HOST)
    ssh.chmod(0o700)
    result = ended(NOISY_COMMAND, command, *arguments[command], "--json", cwd=tmp_path, **{SSH_VARIABLE: str(ssh)})
    assert result.returncode == (1 if command == "status" else 0), result.stderr  # no worker answers
    assert json.loads(result.stdout)
    assert NOISE in result.stderr


def test_what_a_model_prints_and_a_warning_are_no_result(tmp_path):
    (tmp_path / "noisy_network.py").write_text(NOISY_MODEL)
    options = ("--input-shape", "2,3", "--estimate", "--layers", "--json")
    result = ended(COMMAND, "plan", "noisy_network:Network", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["layers"]
    assert result.stderr.splitlines().count(NOISE) == 1
    assert f"{NOISE}, from Python" in result.stderr
    assert "torch 2.99.0" in " ".join(result.stderr.split())


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plan", "--help"], ["worker", "--help"]])
def test_help_is_a_result(arguments, tmp_path):
    result = ended(NOISY_COMMAND, *arguments, cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.strip()
    assert NOISE not in result.stdout
