"""The duration of a fuzzer, and the worker that it attacks, which must survive unharmed.

``FUZZ_SECONDS`` is the time for each fuzzer (by default so short that they are ordinary tests), ``FUZZ_SEED`` its seed.
``make fuzz SECONDS=600`` sets both.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from rpc_runtime.client.session import Session
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.waiting import eventually

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.25"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
WARM_SECONDS = 0.5
MORE_MEMORY_BYTES = 48 << 20


@dataclass
class Trials:
    """Yields the numbers of trials until the time is over. ``found`` counts the results of trials."""

    source: random.Random
    seconds: float = SECONDS
    found: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[int]:
        end, number = time.monotonic() + self.seconds, 0
        while time.monotonic() < end or number < 10:
            yield number
            number += 1
        assert sum(self.found.values()) >= number


@dataclass
class Standing:
    """A worker under attack, with its process and an honest deployment beside it."""

    endpoint: WorkerEndpoint
    process: int
    maker: ProgramMaker
    honest: Session


class Memory:
    """Checks, when a deployment has ended, that a process uses no more memory than after its warm-up."""

    def __init__(self, process: int) -> None:
        self._process = psutil.Process(process)
        self._start = time.monotonic()
        self._warm: int | None = None

    def check(self) -> None:
        if time.monotonic() - self._start < WARM_SECONDS:
            return
        self._warm = self._warm or self._bytes()
        most = self._warm + MORE_MEMORY_BYTES
        eventually(lambda: self._bytes() < most, "the worker gives memory back")

    def _bytes(self) -> int:
        return int(self._process.memory_info().rss)
