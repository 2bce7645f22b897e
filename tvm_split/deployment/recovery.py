"""Where the stages of a bundle go when a machine of its cluster fails, and what happened to a deployment."""

import contextlib
import json
import logging
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TextIO

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.errors import TvmSplitError, WorkerUnavailableError
from rpc_runtime.program.placing import held, place
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.transports.liveness import USUAL_WATCH, WatchTimeouts
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.framing import CHUNK_BYTES
from tvm_split.cluster.cluster import Cluster, Workers
from tvm_split.compiler.bundle import Bundle
from tvm_split.deployment.checks import check_worker
from tvm_split.deployment.run_times import RunTimes
from tvm_split.errors import ClusterError, OutputError, RecoveryWarning
from tvm_split.placement.by_hand import covers
from tvm_split.placement.prediction import Prediction

logger = logging.getLogger(__name__)

Describe = Callable[[Mapping[str, WorkerEndpoint]], Mapping[str, WorkerDescription]]
"""Returns the descriptions of the workers at these addresses."""
MOST_EVENTS = 1000
"""The number of latest events that a deployment keeps."""


class BundleRecovery:
    """Places the stages of a bundle on the machines of its cluster that are left; a `supervisor.Recovery`.

    With ``spares``, also machines with stages hold those that would move to them.
    """

    def __init__(
        self, bundle: Bundle, workers: Workers, endpoints: Mapping[str, WorkerEndpoint], spares: bool = False
    ) -> None:
        self._bundle, self._workers, self._endpoints, self.spares = bundle, workers, endpoints, spares
        expected = bundle.plan.prediction
        fallbacks, steps = ((), ()) if expected is None else (expected.fallbacks, expected.steps)
        self._destinations = {fallback.machine: fallback.destination for fallback in fallbacks}
        self._seconds = {
            (step.name, machine): seconds
            for step in steps
            for machine, seconds in zip(step.machines, step.compute_seconds, strict=True)
        }

    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        return self._endpoints

    def refresh(self) -> None:
        self._endpoints = self._workers.endpoints()

    def place(self, lost: Collection[str], workers: Mapping[str, WorkerDescription]) -> Program:
        gone = [machine for machine in self._bundle.program.machines if machine in lost]
        is_planned = len(gone) == 1 and not any(self._workers.machine(name).standby for name in workers)
        destination = self._destinations.get(gone[0]) if is_planned else None
        unfit = partial(self._unfit, workers)

        def elsewhere(machine: str, stages: Sequence[StageSpec]) -> str:
            return unfit(machine, stages) if machine == destination else "the plan moves it to another machine"

        placed = partial(place, self._bundle.program, lost, list(workers), seconds=self._seconds_on)
        if destination:
            with contextlib.suppress(WorkerUnavailableError):  # the stages do not fit there
                return placed(elsewhere)
        return placed(unfit)

    def holds(self, describe: Describe) -> list[Program]:
        """Return the stages that machines on standby hold; with `spares`, also those that others would take.

        Machines that ``describe`` leaves out hold nothing.
        """
        program = self._bundle.program
        standby = {machine.name for machine in self._workers.machines if machine.standby} - {*program.machines}
        asked = self._endpoints if self.spares else {name: self._endpoints[name] for name in standby}
        workers = describe(asked)
        standby, away = standby & {*workers}, {*asked} - {*workers}
        wanted = {name: set(program.replicas) for name in standby}
        for lost in program.machines if self.spares else ():
            with contextlib.suppress(WorkerUnavailableError):  # nobody would take its stages
                for stage in self.place({lost, *away}, workers).stages:
                    wanted.setdefault(stage.machine, set()).add(stage.name)
        unfit = partial(self._unfit, workers, is_new=True)
        programs = {machine: held(program, machine, names, unfit) for machine, names in wanted.items()}
        for name in standby:
            if programs[name] is None:
                raise ClusterError(f"{name!r} on standby can hold no stage: {unfit(name, program.stages[:1])}")
        return list(filter(None, programs.values()))

    def _unfit(
        self, workers: Mapping[str, WorkerDescription], name: str, stages: Sequence[StageSpec], is_new: bool = False
    ) -> str:
        """Return why a machine cannot get stages; ``is_new``: its worker has none of their weights yet."""
        for layer, forbidden in self._bundle.plan.request.pairs("keep_off"):
            if forbidden == name and any(covers(layer, own) for stage in stages for own in stage.layers):
                return f"layer {layer!r} is kept off it"
        machine, worker = self._workers.machine(name), workers[name]
        if is_new and worker.memory_free_bytes:
            limit = machine.memory_bytes or worker.memory_free_bytes
            machine = replace(machine, memory_bytes=min(limit, worker.memory_free_bytes))
        try:
            check_worker(self._bundle, stages, machine, self._endpoints[name].address, worker)
        except TvmSplitError as error:
            return str(error)
        return ""

    def _seconds_on(self, stage: StageSpec, machine: str) -> float:
        """Return the predicted seconds of a stage on a machine; elsewhere than planned, scaled by the threads."""
        if (seconds := self._seconds.get((stage.name, machine))) is not None:
            return seconds
        planned = self._seconds.get((stage.name, stage.machine), 1.0)
        return planned * self._workers.machine(stage.machine).threads / self._workers.machine(machine).threads


def watch_timeouts(prediction: Prediction | None, cluster: Cluster, seconds: float | None) -> WatchTimeouts:
    """Return how long workers may be silent: ``seconds``, or as long as 1 MiB on the slowest known link takes."""
    if seconds is not None:
        return replace(USUAL_WATCH, silence_seconds=seconds)
    times = [(link.source, link.destination, 1 / (link.bytes_per_second or math.inf)) for link in cluster.links]
    for link in () if prediction is None else prediction.links:
        times.append((link.source, link.destination, link.stream_seconds / (link.bytes or math.inf)))
    silence: dict[str, float] = {}
    for source, destination, seconds_per_byte in times:
        for end in (source, destination):
            silence[end] = max(CHUNK_BYTES * seconds_per_byte, silence.get(end, USUAL_WATCH.silence_seconds))
    return replace(USUAL_WATCH, silence_of=silence)


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
                try:
                    self._file.write(json.dumps(event.to_dict()) + "\n")
                    self._file.flush()
                except OSError as error:  # the deployment goes on without it
                    logger.warning("%s gets no more events: %s", self._file.name, error.strerror)
                    self._file = None

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
