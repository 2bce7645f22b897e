"""Where stages go in tests of recovery and moves, and what happens in the middle of a stream."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import psutil

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import WorkerClient, WorkerDescription
from rpc_runtime.program.placing import place
from rpc_runtime.program.program import Program
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.waiting import PATIENCE_SECONDS, eventually


class AnyMachine:
    """Stages may go to every machine, the busiest last."""

    def __init__(self, program: Program, workers: LocalWorkers) -> None:
        self._program, self._workers = program, workers

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        return self._workers.endpoints

    def refresh(self) -> None:
        pass

    def place(self, lost: Collection[str], workers: Mapping[str, WorkerDescription]) -> Program:
        return place(self._program, lost, list(workers), lambda machine, stages: "", lambda stage, machine: 1.0)


def in_the_middle(batches: Iterable[Any], middle: int, act: Callable[[], object]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number == middle:
            act()
        yield batch


def drain(endpoint: WorkerEndpoint, draining: bool = True) -> None:
    with closing(WorkerClient(endpoint)) as client:
        client.drain(draining, PATIENCE_SECONDS)


def kill(workers: LocalWorkers, *machines: str) -> None:
    """Kill some workers at once, and return when they have ended."""
    processes = [psutil.Process(workers.process_ids[machine]) for machine in machines]
    for process in processes:
        process.kill()
    eventually(lambda: all(has_ended(process) for process in processes), "they have ended")


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
