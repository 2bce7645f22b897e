"""How long to try, and a worker with an honest deployment on it, which has to come through unharmed.

``FUZZ_SECONDS`` is the time for each fuzzer (by default a few seconds, so that they are ordinary tests), ``FUZZ_SEED``
where they begin. ``make fuzz SECONDS=600`` sets both and prints what was tried.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.rpc_runtime.client.test_pipeline import A, B, batches_for, double, same
from tests.rpc_runtime.program_maker import ProgramMaker
from tests.rpc_runtime.raw_calls import memory_bytes, open_files
from tests.waiting import wait_for
from tvm_split.rpc_runtime.client.client import describe
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.client.pipeline import Pipeline
from tvm_split.rpc_runtime.wire.channels import WorkerEndpoint

SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
WARM_SECONDS = 1.0
PROMPT_SECONDS = 8.0
MORE_MEMORY_BYTES = 48 << 20
MORE_FILES = 24


@dataclass
class Trials:
    """Iterate over it: a number for each trial, until the time is over. ``found`` counts how trials ended."""

    source: random.Random
    seconds: float = SECONDS
    found: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[int]:
        end, number = time.monotonic() + self.seconds, 0
        while time.monotonic() < end or number < 10:
            yield number
            number += 1
        assert sum(self.found.values()) >= number


@pytest.fixture
def trials(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Trials]:
    made = Trials(random.Random(f"{SEED} {request.node.name}"))
    yield made
    if "FUZZ_SECONDS" in os.environ:
        with capsys.disabled():
            counts = ", ".join(f"{count} {name}" for name, count in made.found.most_common())
            print(f"\n{request.node.name}: {sum(made.found.values())} trials: {counts}")


@dataclass
class Standing:
    """A worker under attack, with its process and the honest deployment beside."""

    endpoint: WorkerEndpoint
    process: int
    maker: ProgramMaker
    honest: Pipeline


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    """Afterwards it lives, answers promptly and rightly, and holds no more than before."""
    maker = ProgramMaker(tmp_path / "blobs")
    one = maker.stage("one", A, [maker.input("x")], double)
    program = maker.program([maker.stage("two", B, [one], double)])
    batch = batches_for(program, 1)[0]
    with LocalWorkers([A, B]) as workers, Pipeline.open(program, workers.endpoints, maker.blob_path) as honest:
        attacked = Standing(workers.endpoints[A], workers.process_ids[A], maker, honest)
        expected = honest.run(batch)
        files = open_files(attacked.process)
        yield attacked
        start = time.monotonic()
        left = describe(attacked.endpoint, 20)
        assert time.monotonic() - start < PROMPT_SECONDS
        assert left.process_id == attacked.process
        assert wait_for(lambda: len(describe(attacked.endpoint, 20).deployments) == 1, seconds=15)
        assert same(honest.run(batch), expected)
        assert wait_for(lambda: open_files(attacked.process) <= files + MORE_FILES, seconds=15)


class Memory:
    """Checks, when a deployment has ended, that a process takes no more than when it had warmed up."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._start = time.monotonic()
        self._warm: int | None = None

    def check(self) -> None:
        if time.monotonic() - self._start < WARM_SECONDS:
            return
        self._warm = self._warm or memory_bytes(self._process)
        most = self._warm + MORE_MEMORY_BYTES
        assert wait_for(lambda: memory_bytes(self._process) < most, seconds=10), (
            f"{self._warm} bytes were to grow to {most} at most"
        )


@pytest.fixture
def maker(tmp_path: Path) -> ProgramMaker:
    return ProgramMaker(tmp_path / "blobs")
