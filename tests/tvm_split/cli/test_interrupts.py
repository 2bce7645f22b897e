"""Ctrl-C, SIGTERM and SIGHUP, sent to all processes of a long command, end it with one line and leave nothing."""

import itertools
import os
import re
import signal
import subprocess
import sys

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from rpc_runtime.wire.security import TOKEN_VARIABLE
from tests.helpers.mappings import removed_libraries
from tests.helpers.waiting import PATIENCE_SECONDS, eventually, wait_while_running

WORDS = {
    signal.SIGINT: (130, "interrupted\n"),
    signal.SIGTERM: (143, "terminated\n"),
    signal.SIGHUP: (129, "hung up\n"),
}
NOBODY_READS = """
import os, signal, threading
from tvm_split.cli.application import ended_by_signals

read, write = os.pipe()
os.close(read)
os.dup2(write, 2)
with ended_by_signals():
    signal.raise_signal(signal.SIGTERM)
    threading.Event().wait(30)
"""


def is_compiling(process, folder):
    """In TVM, no Python code runs for a long time, and an exception in a callback becomes an error of TVM's own."""
    return list((folder / "scratch").glob("*-build-*"))


def is_running(process, folder):
    return sum(bool(removed_libraries(child.pid)) for child in psutil.Process(process.pid).children()) == 2


COMMANDS = {
    "compile": ("compile deep.onnx --split machine-a=conv_0 --split machine-b=conv_1 --output written", is_compiling),
    "plan": ("plan deep.onnx --output written", is_compiling),
    "profile": ("profile deep.onnx", is_compiling),
    "profile on workers": ("profile deep.onnx --workers 2", is_compiling),
    "run": ("run BUNDLE --repeat 10000000 --output written", is_running),
    "bench": ("bench BUNDLE --rounds 100000", is_running),
    "demo": ("demo --output written", lambda process, folder: psutil.Process(process.pid).children()),
    "worker-kit": ("worker-kit kit/kit.tar.xz", lambda process, folder: list((folder / "kit").iterdir())),
}
IN_SHORT = {("compile", signal.SIGTERM), ("run", signal.SIGINT)}


@pytest.fixture(scope="module")
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


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(*case, marks=[] if case in IN_SHORT else pytest.mark.slow)
        for case in itertools.product(COMMANDS, WORDS)
    ],
)
def test_a_signal_ends_all_of_a_command(start_process, bundle, deep_model, tmp_path, name, number):
    text, is_busy = COMMANDS[name]
    onnx.save(deep_model, tmp_path / "deep.onnx")
    for folder in ("scratch", "kit"):
        (tmp_path / folder).mkdir()
    places = {
        "TMPDIR": str(tmp_path / "scratch"),
        "TVM_SPLIT_CACHE": str(tmp_path / "cache"),
        "TVM_SPLIT_PROGRESS": "0",
    }
    process = start_process(
        *text.replace("BUNDLE", str(bundle)).split(),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **places},
        start_new_session=True,
    )
    wait_while_running(process, lambda: is_busy(process, tmp_path))
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    code, line = WORDS[number]
    assert (process.returncode, output, errors) == (code, "", line)
    assert not psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1]
    # A compiler that is running still ends, and removes its files.
    eventually(lambda: not list((tmp_path / "scratch").glob("tvm-split-*")), "no scratch folder is left")
    assert not list((tmp_path / "kit").iterdir())
    # Of the demo, its bundle may be there already, and whole.
    assert {path.name for path in (tmp_path / "written").glob("*")} <= ({"bundle"} if name == "demo" else set())


def test_a_command_whose_errors_nobody_reads_ends_as_well():
    """One signal may end all processes of a pipeline."""
    ended = subprocess.run([sys.executable, "-c", NOBODY_READS], check=False, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 143


def test_a_run_says_that_a_machine_died(start_process, bundle):
    """And then ends on Ctrl-C."""
    with LocalWorkers(("machine-a", "machine-b"), token="a-token-of-this-test") as workers:
        first, second = workers.endpoints.values()
        command = ("run", bundle, "--repeat", 10**7, "--cluster", f"at:{first.address},{second.address}")
        places = {"PYTHONPATH": os.pathsep.join(sys.path), "TVM_SPLIT_PROGRESS": "0", TOKEN_VARIABLE: first.token}
        process = start_process(*command, env={**os.environ, **places})
        earlier = wait_while_running(process, lambda: computing(first))
        os.kill(workers.process_ids["machine-b"], signal.SIGKILL)
        wait_while_running(process, lambda: computing(first) - earlier)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, output) == (130, "")
    assert re.fullmatch(r"warning: the deployment recovered in .*: machine 'machine-b' .*\ninterrupted\n", errors)


def computing(endpoint):
    """Return the names of a worker's deployments that compute."""
    return {one.name for one in describe(endpoint, PATIENCE_SECONDS).deployments if one.micro_batches_per_second}
