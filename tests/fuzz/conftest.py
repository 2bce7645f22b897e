"""Fuzz trials, whose counts `make fuzz` prints, and a worker with a valid deployment on it."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import describe
from tests.helpers.rpc_runtime.pipelines import same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, batches_for, double
from tests.helpers.trials import SEED, Standing, Trials
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

MORE_FILES = 24


@pytest.fixture
def trials(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Trials]:
    fuzz_trials = Trials(random.Random(f"{SEED} {request.node.name}"))
    yield fuzz_trials
    if "FUZZ_SECONDS" in os.environ:
        with capsys.disabled():
            counts = ", ".join(f"{count} {name}" for name, count in fuzz_trials.found.most_common())
            print(f"\n{request.node.name}: {sum(fuzz_trials.found.values())} trials: {counts}")


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A, B]) as started:
        yield started


@pytest.fixture
def standing(workers: LocalWorkers, tmp_path: Path) -> Iterator[Standing]:
    """Return a worker with a valid deployment, and check both after the test.

    The worker still runs, computes correctly, and holds no additional memory.
    """
    maker = ProgramMaker(tmp_path / "blobs")
    tensor = maker.stage("one", A, [maker.input("x")], double)
    program = maker.program([maker.stage("two", B, [tensor], double)])
    batch = batches_for(program, 1)[0]
    with Session(Opening(program, workers.endpoints, maker.blob_path)) as honest:
        attacked = Standing(workers.endpoints[A], workers.process_ids[A], maker, honest)
        expected = honest.run(batch)
        process = psutil.Process(attacked.process)
        files = process.num_fds()
        yield attacked
        described = lambda: describe(attacked.endpoint, PATIENCE_SECONDS)  # noqa: E731
        assert described().process_id == attacked.process
        eventually(lambda: len(described().deployments) == 1, "only the honest deployment is left")
        assert same(honest.run(batch), expected)
        eventually(lambda: process.num_fds() <= files + MORE_FILES, "no file is left open")


@pytest.fixture
def maker(tmp_path: Path) -> ProgramMaker:
    return ProgramMaker(tmp_path / "blobs")
