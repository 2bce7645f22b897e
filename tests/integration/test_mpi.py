"""Networks on workers that one ``mpiexec`` has started, with links over MPI."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TOKEN_VARIABLE
from tests.helpers.rpc_runtime.mpi_ranks import MPIEXEC
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import eventually
from tvm_split.cluster.machine import Link, Machine

NAMES = ("machine-a", "machine-b", "machine-c")
LAYERS = ("0", "1", "2")
TOKEN = "0123456789abcdef" * 2


def _objects(line: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a line; mpiexec may join the output of several ranks in one line."""
    assert line, "mpiexec has ended"
    while line := line.strip():
        value, end = json.JSONDecoder().raw_decode(line)
        yield value
        line = line[end:]


@contextmanager
def mpi_workers(names: Sequence[str], cache: Path) -> Iterator[tuple[Mapping[str, WorkerEndpoint], Mapping[str, int]]]:
    """Start workers; yield their endpoints and process ids. End them afterwards."""
    command = [MPIEXEC]
    for name in names:
        worker = [sys.executable, "-m", "rpc_runtime.worker", "--transport", "mpi", "--json", "--name", name]
        command += [*([":"] if len(command) > 1 else []), "-n", "1", *worker, "--cache", str(cache)]
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    try:
        assert process.stdout is not None
        ready: list[dict[str, Any]] = []
        while len(ready) < len(names):
            ready += _objects(process.stdout.readline())
        yield (
            {worker["name"]: WorkerEndpoint(worker["name"], worker["address"], TOKEN) for worker in ready},
            {worker["name"]: worker["pid"] for worker in ready},
        )
    finally:
        process.send_signal(signal.SIGINT)  # mpiexec passes it on
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8 if index else 3, 8, 3, padding=1), nn.ReLU()) for index in range(len(LAYERS))]
    return nn.Sequential(*layers).eval()


def inputs(count: int) -> Iterator[tuple[np.ndarray]]:
    generator = np.random.default_rng(1)
    for _ in range(count):
        yield (generator.standard_normal((2, 3, 40, 40), np.float32),)


def joined_by_mpi(endpoints: Mapping[str, WorkerEndpoint]) -> tvm_split.Cluster:
    machines = tuple(Machine(name, endpoint=endpoint) for name, endpoint in endpoints.items())
    links = tuple(Link(*ends, 1e9, transport="mpi") for ends in permutations(endpoints, 2))
    return tvm_split.Cluster(machines, (*links, *(Link("client", name, 1e9) for name in endpoints)))


def deployed(cluster: tvm_split.Cluster) -> tvm_split.Deployment:
    return tvm_split.deploy(compiled_for(cluster.machine_names), cluster)


@cache
def compiled_for(names: tuple[str, ...]) -> tvm_split.Bundle:
    split: dict[str, list[str]] = {name: [] for name in names}
    for index, layer in enumerate(LAYERS):
        split[names[index * len(names) // len(LAYERS)]].append(layer)
    model = tvm_split.load_model(network(), (torch.zeros(2, 3, 40, 40),))
    return tvm_split.compile(model, tvm_split.plan(model, tvm_split.Cluster.local(len(names)), split=split))


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*mpich*")}


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_outputs_are_those_of_torch(ranks: int, tmp_path: Path) -> None:
    expected, before = network(), segments()
    with (
        mpi_workers(NAMES[:ranks], tmp_path) as (endpoints, processes),
        deployed(joined_by_mpi(endpoints)) as deployment,
    ):
        outputs = list(deployment.stream(inputs(20)))
    for (value,), (output,) in zip(inputs(20), outputs, strict=True):
        np.testing.assert_allclose(output, expected(torch.from_numpy(value)).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert not any(map(psutil.pid_exists, processes.values()))
    assert segments() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_is_killed_is_named_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Which worker is reported first is random: the killed one, or one that `mpiexec` then ends."""
    before = segments()
    anyone = "|".join(NAMES)
    with (
        mpi_workers(NAMES, tmp_path) as (endpoints, processes),
        deployed(joined_by_mpi(endpoints)) as deployment,
    ):
        results = deployment.stream(inputs(1_000_000))
        next(results)
        os.kill(processes[name], signal.SIGKILL)
        message = rf"machine '({anyone})'.*has gone.*links over MPI end"  # and not: silent for 5 s
        with pytest.raises(WorkerUnavailableError, match=message):
            list(results)
    eventually(lambda: not any(map(psutil.pid_exists, processes.values())), "all ranks have ended")
    assert segments() == before


@pytest.mark.slow
def test_two_worlds_are_not_joined(tmp_path: Path) -> None:
    with (
        mpi_workers(("machine-a", "x"), tmp_path) as (first_world, _),
        mpi_workers(("machine-b", "y"), tmp_path) as (second_world, _),
    ):
        endpoints = {"machine-a": first_world["machine-a"], "machine-b": second_world["machine-b"]}
        with pytest.raises(WorkerError, match=r"machine 'machine-b'.*different MPI worlds: one mpiexec"):
            deployed(joined_by_mpi(endpoints))
