"""Starts workers by one ``mpiexec``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.security import TOKEN_VARIABLE
from tests.helpers.rpc_runtime.mpi_ranks import MPIEXEC
from tests.helpers.rpc_runtime.worker_process import ROOT

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
