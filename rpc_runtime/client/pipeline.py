"""Runs a program on workers: opens it, streams micro-batches through it, measures it, and closes it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpc_runtime.client.deployed_workers import DeployedWorkers, TransferProgress
from rpc_runtime.client.streams import Streams
from rpc_runtime.client.watch import WorkerWatch
from rpc_runtime.closing import Closing
from rpc_runtime.errors import InputError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.interface import Array
from rpc_runtime.program.machine_plan import MachinePlan, machine_plan
from rpc_runtime.program.measurements import LinkStatistics, StageStatistics, TraceEvent
from rpc_runtime.program.program import CLIENT, Program
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts
from rpc_runtime.transports.opening import LinkCall
from rpc_runtime.transports.transport import DEFAULT, NO_SETTINGS, LinkSettings
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.foreign_text import cleaned
from rpc_runtime.wire.framing import CHUNK_BYTES
from rpc_runtime.wire.messages import hello_of

logger = logging.getLogger(__name__)

CAUSE_SECONDS = 0.5


class Pipeline(Closing):
    """A program that is loaded on workers. Made by ``Pipeline.open``; a context manager.

    Threads may run and stream at the same time. ``run`` and ``stream`` raise:
        InputError: an input does not fit the program.
        WorkerUnavailableError: a worker has gone, hangs, or lost a connection; the pipeline is then done for.
        StageError: a stage raised; the pipeline is then done for.
        DeadlineError: nothing moved for ``timeout_seconds`` while a result was due.
    """

    def __init__(
        self,
        program: Program,
        endpoints: Mapping[str, WorkerEndpoint],
        timeout_seconds: float,
        links: LinkSettings = NO_SETTINGS,
        in_flight: int | None = None,
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
    ) -> None:
        """Connects to nothing yet: use ``open``."""
        missing = [machine for machine in program.machines if machine not in endpoints]
        if missing:
            raise InputError(f"the program needs the machines {missing}, and only {sorted(endpoints)} have an address")
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._links = links
        self._streams = Streams(program, timeout_seconds, in_flight, self._waited_for, timeouts)
        self._workers = DeployedWorkers(program, endpoints, links)
        # Only stages without inputs compute micro-batches that nobody has submitted.
        self._ahead = 0 if all(stage.inputs for stage in program.stages) else self._streams.queued
        self._most_activity = {machine: activity_of_one(machine_plan(program, machine)) for machine in program.machines}
        self._calls: list[LinkCall] = []
        self._links_of_workers: tuple[LinkStatistics, ...] = ()
        stages = {machine: [stage.name for stage in program.stages_on(machine)] for machine in program.machines}
        self._watch = WorkerWatch(
            self._workers.deployment,
            self._workers.connections,
            stages,
            self._streams.fail,
            self._worker_moved,
            timeouts,
        )

    @classmethod
    def open(
        cls,
        program: Program,
        endpoints: Mapping[str, WorkerEndpoint],
        blob_path: Callable[[str], Path],
        *,
        timeout_seconds: float = 60.0,
        on_progress: TransferProgress | None = None,
        links: LinkSettings = NO_SETTINGS,
        in_flight: int | None = None,
        timeouts: LinkTimeouts = USUAL_TIMEOUTS,
    ) -> Pipeline:
        """Sends what the workers lack, loads the stages and connects the machines.

        ``blob_path`` finds the file of a blob by its SHA-256. ``timeout_seconds`` is how long any one step, and later
        any one result, may show no sign of life. ``on_progress`` is called from one thread at a time.
        ``links`` says how links are to be opened, where not as usual.
        ``in_flight`` limits the micro-batches between being fed and being taken; by default the queues alone do.
        ``timeouts`` say after how long a worker or a link that is silent is taken for dead.

        Raises:
            TvmSplitError: a worker cannot be reached, refuses, or cannot run its stages. Nothing stays behind.
        """
        pipeline = cls(program, endpoints, timeout_seconds, links, in_flight, timeouts)
        try:
            pipeline._open(blob_path, on_progress)
        except BaseException:
            pipeline.close()
            raise
        return pipeline

    def _open(self, blob_path: Callable[[str], Path], on_progress: TransferProgress | None) -> None:
        self._workers.describe(self._timeout_seconds)
        self._watch.start(self._timeout_seconds)
        self._workers.load(blob_path, self._timeout_seconds, on_progress)
        try:
            self._links_of_workers = self._workers.connect(self._timeout_seconds)
            self._open_streams()
        except WorkerError as error:
            raise self._cause_of(error) from error
        endpoints = ", ".join(map(str, self._workers.endpoints.values()))
        logger.info("deployment %s runs on %s", self._workers.deployment[:8], endpoints or "no machine")
        for call in self._calls:
            logger.debug("%s", call.statistics)

    def _open_streams(self) -> None:
        for machine, outgoing in self._streams.outgoing.items():
            self._call(machine, CLIENT, machine, outgoing)
        for machine, incoming in self._streams.incoming.items():
            self._call(machine, machine, CLIENT, incoming)
        for call in self._calls:
            call.wait_accepted(self._timeout_seconds)

    def _call(self, machine: str, source: str, destination: str, link: LinkEnd) -> None:
        endpoint, token = self._workers.endpoints[machine], self._workers.connections[machine].token
        endpoint = replace(endpoint, transport=self._links.get((source, destination), DEFAULT).wanted)
        hello = hello_of(self._workers.deployment, source, destination)
        self._calls.append(LinkCall(endpoint, token, hello, link, self._watch.link_broken))

    def _cause_of(self, error: WorkerError) -> TvmSplitError:
        """Why connecting failed: often because something else broke, which the watch hears of at the same time."""
        if not self._watch.wait_report(CAUSE_SECONDS):
            return error
        return self._streams.wait_failure(self._watch.verdict_seconds) or error

    @property
    def program(self) -> Program:
        return self._program

    @property
    def blob_bytes_sent(self) -> int:
        """Bytes of libraries and weights that the workers did not have yet."""
        return self._workers.blob_bytes_sent

    @property
    def weight_bytes(self) -> Mapping[str, int]:
        """By machine, the bytes of the weights that its worker says it holds."""
        return self._workers.weight_bytes

    def run(self, inputs: Sequence[Any]) -> tuple[Array, ...]:
        """The outputs for one micro-batch, in the program's order."""
        return self._streams.run(inputs)

    def stream(self, batches: Iterable[Sequence[Any]]) -> Iterator[tuple[Array, ...]]:
        """The outputs for many micro-batches, lazily and in order.

        A thread takes ``batches`` from the iterable as the pipeline has room, so however slow the iterable is, results
        that are ready come out, and however long it is, memory stays bounded. What the iterable raises is raised here,
        after the results before it. A generator that is closed early abandons what is under way.
        """
        return self._streams.stream(batches)

    def _waited_for(self, sequence: int) -> str:
        """The first stage that has its inputs for a micro-batch and has not computed it."""
        finished = self._watch.finished()
        for stage in self._program.stages:
            own = stage.own_turns
            if sequence in own and finished.get((stage.machine, cleaned(stage.name)), 0) <= own.count_before(sequence):
                endpoint = self._workers.endpoints[stage.machine]
                return f"stage {stage.name!r} on {endpoint} to compute micro-batch {sequence}"
        return f"the results of micro-batch {sequence}, which every stage has computed"

    def _worker_moved(self, machine: str, activity: int) -> None:
        """Believes a worker as far as what was submitted can have moved it: one that lies must not keep us waiting."""
        if activity <= (self._streams.submitted + self._ahead) * self._most_activity[machine]:
            self._streams.moved()

    def statistics(self) -> tuple[StageStatistics, ...]:
        """What each stage, and each replica of one, has done since ``open``, in the program's order."""
        self._streams.require_usable()
        return self._workers.statistics()

    def last_statistics(self) -> tuple[StageStatistics, ...]:
        """The same; when something has failed, until then, and of the stages whose machines still answer."""
        self._streams.require_open()
        if not self._streams.has_failed:
            with contextlib.suppress(WorkerUnavailableError):  # of which the watch has not heard yet
                return self._workers.statistics()
        return self._workers.last_statistics()

    def links(self) -> tuple[LinkStatistics, ...]:
        """What carries each link; when something has failed, what did."""
        self._streams.require_open()
        return (*(call.statistics for call in self._calls), *self._links_of_workers)

    def processor_seconds(self) -> dict[str, float]:
        """By machine, what its worker has used of its cores since it started: computing, transport, everything."""
        self._streams.require_usable()
        return self._workers.processor_seconds()

    def trace(self) -> tuple[TraceEvent, ...]:
        """The last events of every machine, by their start, in this process's monotonic clock."""
        self._streams.require_usable()
        return self._workers.trace()

    def close(self) -> None:
        """Ends the deployment on all workers. May be called again, also after a failure; no concern of a fork's."""
        if not self._streams.own_process.is_this:
            return
        if self._streams.close():
            self._workers.unload()
        self._watch.close()
        for call in self._calls:
            call.close()
        self._workers.close()


def activity_of_one(plan: MachinePlan) -> int:
    """By how much one micro-batch moves a worker's activity at most: `rpc_runtime.program.measurements.Recorder`."""
    moved = (*plan.incoming, *plan.outgoing)
    return sum(max(1, -(-route.tensor.size_bytes // CHUNK_BYTES)) + 1 for route in moved) + 2 * len(plan.stages)
