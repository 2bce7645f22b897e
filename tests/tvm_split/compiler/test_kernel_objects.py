"""A kernel is compiled once, whatever cut or network it is in; damaged and missing objects are compiled again."""

import itertools
import json
import math
import shutil
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.compiler import kernel_processes
from tvm_split.compiler.kernel_objects import default_folder, kernel_objects
from tvm_split.compiler.kernel_processes import compiled_objects
from tvm_split.compiler.targets import host_target
from tvm_split.errors import CacheWarning
from tvm_split.profiling.kernels import target_code

pytestmark = pytest.mark.usefixtures("cache")

CLUSTER = tvm_split.Cluster.in_process(machines=2, threads=1)


def model_of(*sizes: int) -> tvm_split.Model:
    torch.manual_seed(0)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return tvm_split.load_model(nn.Sequential(*layers).eval(), (torch.ones(2, sizes[0]),))


def compiled(model: tvm_split.Model, first: list[str], second: list[str]) -> tvm_split.Bundle:
    plan = tvm_split.plan(model, CLUSTER, split={"machine-a": first, "machine-b": second})
    return tvm_split.compile(model, plan, verify=False)


def objects() -> dict[str, float]:
    return {path.name: path.stat().st_ctime for path in default_folder().iterdir()}


def right(model: tvm_split.Model, bundle: tvm_split.Bundle) -> None:
    with tvm_split.deploy(bundle, CLUSTER) as deployment:
        (output,) = deployment.run(*model.example_inputs)
    np.testing.assert_allclose(output, model.reference.outputs(model.example_inputs)[0], rtol=1e-5, atol=1e-6)


def test_another_cut_and_another_network_share_kernels() -> None:
    model = model_of(8, 16, 8, 16)
    compiled(model, ["0", "1", "2"], ["4"])
    kept = objects()
    other = compiled(model, ["0"], ["2", "3", "4"])
    assert objects().keys() == kept.keys()
    right(model, other)
    longer = model_of(8, 16, 8, 16, 8, 4)
    right(longer, compiled(longer, ["0"], ["2"]))
    assert len(objects()) == len(kept) + 1  # that of the last layer


def test_what_was_timed_is_what_is_linked() -> None:
    model = model_of(8, 16)
    target = host_target(1)
    code = target_code(model, target, None)
    kernel_objects(code.functions(), target, code.functions)
    kept = objects()
    bundle = tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.in_process(machines=1, threads=1)))
    assert objects().keys() == kept.keys()
    right_names = {call.digest for call in code.calls}
    assert {kernel.function for kernels in bundle.kernels.values() for kernel in kernels} == right_names


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "folder", "of another"])
def test_a_damaged_object_is_compiled_again(damage: str, cache: Path) -> None:
    model = model_of(8, 16, 8)
    compiled(model, ["0"], ["2"])
    shutil.rmtree(cache / "compiled")
    contents = {path: path.read_bytes() for path in default_folder().iterdir()}
    first, *_ = contents.values()
    for path, content in contents.items():
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            damaged = {"changed": content[:-8] + bytes(8), "cut": content[:-100], "empty": b"", "of another": first}
            path.write_bytes(damaged[damage])
    if damage == "folder":
        with pytest.warns(CacheWarning):
            right(model, compiled(model, ["0"], ["2"]))
    else:
        right(model, compiled(model, ["0"], ["2"]))
        assert all(path.stat().st_size > 200 for path in default_folder().iterdir())


def test_a_cache_that_cannot_be_written_costs_only_time(cache: Path) -> None:
    model = model_of(8, 16, 8)
    (cache / "kernels").write_text("not a folder")
    with pytest.warns(CacheWarning, match="kernels"):
        right(model, compiled(model, ["0"], ["2"]))


def test_processes_compile_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    target = host_target(1)
    functions = target_code(model_of(8, 16, 24, 8, 12), target, None).functions()
    kernels = {name: kernel.with_attr("global_symbol", name) for name, kernel in functions.items()}
    shown: list[int] = []
    alone = compiled_objects(kernels, target, math.inf, shown.append)
    assert shown == list(range(len(kernels)))
    assert list(compiled_objects(kernels, target, 0.0, shown.append)) == list(kernels)[:1]  # its time is over
    monkeypatch.setattr(kernel_processes, "LEAST_TIMED", 1)
    monkeypatch.setattr(kernel_processes, "SECONDS_PER_PROCESS", 1e-9)
    assert compiled_objects(kernels, target, math.inf, shown.append) == alone
    assert compiled_objects(kernels, target, 0.0, shown.append).items() < alone.items()


def test_a_process_whose_starter_was_killed_ends() -> None:
    ours, theirs = Pipe()
    number = theirs.fileno()
    command = [sys.executable, "-m", "tvm_split.compiler.kernel_process", str(number), json.dumps(dict(host_target(1)))]
    process = subprocess.Popen(command, pass_fds=[number])
    theirs.close()
    ours.close()  # as the system does for a killed process
    assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize(
    "other",
    [[sys.executable, "-c", ""], [sys.executable, "-c", "import time; time.sleep(3600)"], ["/no/such/file"]],
    ids=["ends", "hangs", "cannot start"],
)
def test_processes_that_fail_cost_only_time(other: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = host_target(1)
    functions = target_code(model_of(8, 16, 24), target, None).functions()
    kernels = {name: kernel.with_attr("global_symbol", name) for name, kernel in functions.items()}
    alone = compiled_objects(kernels, target, math.inf, lambda done: None)
    for name, value in {"LEAST_TIMED": 1, "SECONDS_PER_PROCESS": 1e-9, "TIMEOUT_SECONDS": 0.1}.items():
        monkeypatch.setattr(kernel_processes, name, value)
    start = subprocess.Popen
    monkeypatch.setattr(kernel_processes.subprocess, "Popen", lambda command, **how: start(other, **how))
    assert compiled_objects(kernels, target, math.inf, lambda done: None) == alone


def test_two_processes_fill_the_cache_at_once(tmp_path: Path) -> None:
    script = (
        "import sys, torch, tvm_split\n"
        "torch.manual_seed(0)\n"
        "network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))\n"
        "model = tvm_split.load_model(network.eval(), (torch.ones(2, 8),))\n"
        "cluster = tvm_split.Cluster.in_process(machines=2, threads=1)\n"
        "plan = tvm_split.plan(model, cluster, split={'machine-a': ['0'], 'machine-b': ['2']})\n"
        "tvm_split.compile(model, plan).save(sys.argv[1])\n"
    )
    paths = [tmp_path / name for name in ("one", "two")]
    processes = [subprocess.Popen([sys.executable, "-c", script, str(path)]) for path in paths]
    assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0, 0]
    one, two = map(tvm_split.Bundle.load, paths)
    assert one == two
