"""A worker marks stages and micro-batches by NVTX ranges, which a profiler of 60 lines of C sees without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import tvm_split
from tests.helpers.waiting import PATIENCE_SECONDS
from tests.viewers.lab import FOLDER


def test_ranges_of_a_worker(tmp_path: Path) -> None:
    profiler, lines = tmp_path / "injection.so", tmp_path / "lines"
    source = Path(__file__).with_name("injection.c")
    compiler = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1", "-o", str(profiler), str(source)]
    subprocess.run(compiler, check=True, timeout=PATIENCE_SECONDS)
    variables = {"NVTX_INJECTION64_PATH": str(profiler), "NVTX_LINES": str(lines), "TVM_SPLIT_TOKEN": "open-sesame"}
    python_path = f"{FOLDER}:{os.environ.get('PYTHONPATH', '')}"
    worker = subprocess.Popen(
        ["tvm-split", "worker", "--nvtx", "--name", "machine-a", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables, "PYTHONPATH": python_path},
    )
    try:
        assert worker.stdout is not None
        address = json.loads(worker.stdout.readline())["address"]
        cluster = tvm_split.Cluster.at(f"at:{address}", token="open-sesame")
        model = tvm_split.load_model(nn.Linear(4, 4).eval(), (torch.zeros(1, 4),))
        bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, estimate=True), verify=False)
        with tvm_split.deploy(bundle, cluster) as deployment:
            list(deployment.stream([(torch.zeros(1, 4),)] * 3))
            (stage,) = deployment.stages
    finally:
        worker.terminate()
        worker.communicate(timeout=PATIENCE_SECONDS)
    expected = [line for number in range(3) for line in (f"begin tvm-split {stage.name} {number}", "end tvm-split")]
    assert lines.read_text().splitlines() == expected
