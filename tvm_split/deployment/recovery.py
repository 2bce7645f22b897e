"""Where the stages of a bundle go when a machine of its cluster fails, and what happened to a deployment."""

import json
import threading
import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TextIO

from rpc_runtime.client.supervisor import DeploymentEvent
from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.placing import place
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.transports.transport import AUTO, transport_named
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Workers
from tvm_split.compiler.bundle import Bundle
from tvm_split.deployment.checks import check_worker, check_workers
from tvm_split.deployment.run_times import RunTimes
from tvm_split.errors import ClusterError, OutputError, RecoveryWarning

MOST_EVENTS = 1000
"""The number of latest events that a deployment keeps."""


class BundleRecovery:
    """Places the stages of a bundle on the machines of its cluster that are left; a `supervisor.Recovery`."""

    def __init__(self, bundle: Bundle, workers: Workers, endpoints: Mapping[str, WorkerEndpoint]) -> None:
        self._bundle, self._workers, self._endpoints = bundle, workers, endpoints
        prediction = bundle.plan.prediction
        steps = () if prediction is None else prediction.steps
        self._seconds = {
            (step.name, machine): seconds
            for step in steps
            for machine, seconds in zip(step.machines, step.compute_seconds, strict=True)
        }

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        for name in {setting.transport for setting in self._workers.link_settings.values()} - {AUTO}:
            if not (transport := transport_named(name)).outlives_machines:
                raise ClusterError(f"links over {transport.title} end on all machines with the first: start all again")
        return self._endpoints

    def place(self, lost: Collection[str], workers: Mapping[str, WorkerDescription]) -> Program:
        unfit = partial(self._unfit, workers)
        return place(self._bundle.program, lost, list(workers), unfit, self._seconds_on)

    def check(self, program: Program, workers: Mapping[str, WorkerDescription]) -> None:
        check_workers(self._bundle, program, self._workers, self._endpoints, workers)

    def _unfit(self, workers: Mapping[str, WorkerDescription], machine: str, stages: Sequence[StageSpec]) -> str:
        try:
            address = self._endpoints[machine].address
            check_worker(self._bundle, stages, self._workers.machine(machine), address, workers[machine])
        except TvmSplitError as error:
            return str(error)
        return ""

    def _seconds_on(self, stage: StageSpec, machine: str) -> float:
        """Return the predicted seconds of a stage on a machine; elsewhere than planned, scaled by the threads."""
        if (seconds := self._seconds.get((stage.name, machine))) is not None:
            return seconds
        planned = self._seconds.get((stage.name, stage.machine), 1.0)
        return planned * self._workers.machine(stage.machine).threads / self._workers.machine(machine).threads


class EventLog:
    """The events of a deployment: the latest are kept, all are appended to a file if there is one. Thread-safe."""

    def __init__(self, file: Path | None) -> None:
        self._lock = threading.Lock()
        self._events: deque[DeploymentEvent] = deque(maxlen=MOST_EVENTS)
        self._unsaid: deque[DeploymentEvent] = deque(maxlen=MOST_EVENTS)
        self.times = RunTimes()
        """When results came since the stages were placed as they are now, which was at ``placed``."""
        self.placed = datetime.now(UTC)
        self._file = None if file is None else _appending(file)

    @property
    def events(self) -> tuple[DeploymentEvent, ...]:
        with self._lock:
            return tuple(self._events)

    def add(self, event: DeploymentEvent) -> None:
        with self._lock:
            self._events.append(event)
            if event.kind == "recovered":
                self._unsaid.append(event)
            if event.placement:
                self.placed = event.time
                self.times.restart()
            if self._file is not None:
                self._file.write(json.dumps({**asdict(event), "time": event.time.isoformat()}) + "\n")
                self._file.flush()

    def warn(self) -> None:
        """Warn of the recoveries since the last call, in the thread of the caller, who waits for results."""
        if not self._unsaid:  # looked at before every result
            return
        with self._lock:
            unsaid = tuple(self._unsaid)
            self._unsaid.clear()
        for event in unsaid:
            warnings.warn(f"the deployment {event.text}", RecoveryWarning, stacklevel=4)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _appending(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
