"""A worker for one test, and a valid deployment on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from tests.helpers.rpc_runtime.pipelines import deployments_left, open_on, same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, one_stage
from tests.helpers.waiting import PATIENCE_SECONDS


@pytest.fixture
def honest(workers: LocalWorkers, tmp_path: Path) -> Iterator[None]:
    """Yield a deployment that gives correct results before and after the test."""
    maker = ProgramMaker(tmp_path / "honest")
    program = one_stage(maker)
    batch = batches_for(program, 1)[0]
    with open_on(workers, program, maker) as pipeline:
        expected = pipeline.run(batch)
        yield
        assert same(pipeline.run(batch), expected)
        describe(workers.endpoints[A], PATIENCE_SECONDS)
    assert deployments_left(workers.endpoints[A]) == ()


@pytest.fixture
def own_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A]) as started:
        yield started
