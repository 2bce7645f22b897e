"""Every command and program of the document on observing runs as it is written, beside a stream."""

import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tvm_split
from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers.labs import streaming, write_lab
from tests.helpers.rpc_lab import free_port
from tests.models.small_onnx_model import INPUT_SHAPE, small_model
from tvm_split.cli.application import app

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "observing.md").read_text()
X = np.zeros(INPUT_SHAPE, np.float32)
NAMES = ("machine-a", "machine-b")
SERVERS = ("worker", "dashboard")
"""Commands that run until Ctrl-C."""
ELSEWHERE = "--nvtx"
"""An option whose package only `make test-extra NAME=viewers` installs, which runs it."""


def commands() -> list[str]:
    """The commands of the document, each once."""
    blocks = re.findall(r"^tvm-split [^#\n]+", TEXT, re.MULTILINE)
    return [*dict.fromkeys(text.strip() for text in (*blocks, *re.findall(r"`(tvm-split [^`]+)`", TEXT)))]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with ``lab.yaml``, ``bundle`` and what else commands read; a stream runs in that lab."""
    folder = tmp_path_factory.mktemp("lab")
    model = tvm_split.load_model(small_model())
    split = {"machine-a": ["conv_1"], "machine-b": ["conv_2"]}
    plan = tvm_split.plan(model, tvm_split.Cluster.local(2), split=split, predict=True, estimate=True)
    plan.save(folder / "plan.json")
    bundle = tvm_split.compile(model, plan, verify=False)
    bundle.save(folder / "bundle")
    with LocalWorkers(NAMES) as workers:
        cluster = tvm_split.Cluster.from_yaml(write_lab(folder, workers.endpoints))
        with tvm_split.deploy(bundle, cluster) as deployment, streaming(deployment, [X]):
            deployment.trace(folder / "run.json")
            yield folder


@pytest.fixture(autouse=True)
def folder(lab: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab)
    return lab


def test_there_are_commands_of_every_kind() -> None:
    assert {command.split()[1] for command in commands()} >= {
        "run",
        "trace",
        "simulate",
        "report",
        "dashboard",
        "worker",
    }


@pytest.mark.parametrize("command", [text for text in commands() if text.split()[1] not in SERVERS])
def test_a_command(command: str, folder: Path) -> None:
    # The lab's deployment is not the only one while another command runs its own; both have the model's name.
    words = command.split()[1:]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for flag in ("--trace", "--output"):
        if flag in words:
            assert (folder / words[words.index(flag) + 1]).exists()


@pytest.mark.parametrize(
    "command", [text for text in commands() if text.split()[1] in SERVERS and ELSEWHERE not in text]
)
def test_a_command_that_runs_until_it_is_interrupted(command: str, start_process) -> None:
    for flag in re.findall(r"--(?:metrics-)?listen (127\.0\.0\.1:\d+)", command):
        command = command.replace(flag, f"127.0.0.1:{free_port()}")  # the document's may be in use here
    words = command.split()[1:]
    if words[0] == "dashboard":
        words += ["--listen", f"127.0.0.1:{free_port()}"]
    process = start_process(*words)
    line = process.stdout.readline()
    if words[0] == "dashboard":
        with urllib.request.urlopen(line.split()[-1], timeout=30) as reply:
            assert b"<main>" in reply.read()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) in (0, 130)


def test_the_program(lab: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    bundle, cluster = tvm_split.Bundle.load("bundle"), tvm_split.Cluster.local(2)
    names = {"tvm_split": tvm_split, "bundle": bundle, "cluster": cluster, "batches": [X] * 20}
    exec(compile(program, "observing.md", "exec"), names)


@pytest.mark.parametrize("call", sorted(set(re.findall(r"`(?:with )?(deployment\.[a-z_]+\([^`]*\)):?`", TEXT))))
def test_a_call(call: str, lab: Path) -> None:
    call = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{free_port()}", call)
    with tvm_split.deploy("bundle", tvm_split.Cluster.in_process(2)) as deployment:
        result = eval(call, {"deployment": deployment})
        if hasattr(result, "__enter__"):
            with result:
                deployment.run(X)
