"""Forks of a process with a running pipeline, as torch's DataLoader makes them: both processes continue to work."""

import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers.rpc_runtime.pipelines import open_on
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import chain
from tests.helpers.rpc_runtime.worker_process import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((2, 8), float(number))


def test_a_data_loader_with_processes(workers: LocalWorkers, maker: ProgramMaker) -> None:
    with open_on(workers, chain(maker), maker, timeout_seconds=PATIENCE_SECONDS) as pipeline:
        expected = [pipeline.run([number])[0] for number in map(Numbers().__getitem__, range(30))]
        for _ in range(2):
            loader = DataLoader(Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork")
            results = [result[0] for result in pipeline.stream([number] for number in loader)]
            assert all((a == b).all() for a, b in zip(results, expected, strict=True))


_FORKS = """
import os, sys
from pathlib import Path
sys.modules["torch"] = None  # TVM imports it, and nobody here needs it
from tests.helpers.rpc_runtime.programs import batches_for
from tests.helpers.rpc_runtime.programs import chain
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.in_process import InProcessRunner

maker = ProgramMaker(Path(sys.argv[1]))
program = chain(maker)
batch = batches_for(program, 1)[0]
with (
    LocalWorkers(program.machines) as workers,
    Session(Opening(program, workers.endpoints, maker.blob_path)) as pipeline,
    InProcessRunner(program, maker.blob_path, 2) as here,
):
    stream = pipeline.stream([batch] * 100)
    next(stream), here.run(batch)
    child = os.fork()
    if child == 0:
        for use in (lambda: pipeline.run(batch), lambda: here.run(batch), lambda: next(stream)):
            try:
                use()
            except WorkerError as error:
                assert "forked" in str(error)
            else:
                os._exit(3)
    else:
        assert os.waitpid(child, 0)[1] == 0
        assert (pipeline.run(batch)[0] == here.run(batch)[0]).all()
        print("right")
# The child comes here as well, and ends as any process does.
"""


def test_a_child_that_leaves_by_the_same_door(tmp_path: Path) -> None:
    """The fork gets an error that names the pipelines' owner; it ends neither pipelines, workers, nor folders."""
    command = [sys.executable, "-c", _FORKS, str(tmp_path / "blobs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
