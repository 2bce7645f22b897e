"""Runs a program on workers: opens it, streams micro-batches through it, measures it, and closes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from tvm_split.rpc_runtime.client.client import WorkerEndpoint
from tvm_split.rpc_runtime.client.deployed_workers import DeployedWorkers, TransferProgress
from tvm_split.rpc_runtime.client.result_queue import ResultQueue, array_slot
from tvm_split.rpc_runtime.client.watch import LONGEST_VERDICT_SECONDS, WorkerWatch
from tvm_split.rpc_runtime.errors import DeadlineError, InputError, TvmSplitError, WorkerError
from tvm_split.rpc_runtime.program.inputs import checked_inputs, flat_bytes
from tvm_split.rpc_runtime.program.interface import Array
from tvm_split.rpc_runtime.program.machine_plan import MachinePlan, PlannedRoute, machine_plan
from tvm_split.rpc_runtime.program.measurements import StageStatistics, TraceEvent
from tvm_split.rpc_runtime.program.program import CLIENT, Program
from tvm_split.rpc_runtime.transports.credit_window import MOST_MORE
from tvm_split.rpc_runtime.transports.link_call import LinkCall
from tvm_split.rpc_runtime.transports.links import IncomingLink, OutgoingLink
from tvm_split.rpc_runtime.wire.foreign_text import cleaned
from tvm_split.rpc_runtime.wire.framing import CHUNK_BYTES

CAUSE_SECONDS = 0.5
UNDER_WAY_PER_LEAD = 4
"""Limits the micro-batches under way, times what a full pipeline holds and the most replicas of a stage: more than all
queues of a path can hold. Windows that far links have widened come on top, one for every link of the longest path."""


@dataclass(eq=False)
class _Stream:
    """One use of the pipeline: what its feeder has done so far."""

    ended: bool = False
    error: BaseException | None = None


class Pipeline:
    """A program that is loaded on workers. Made by ``Pipeline.open``; a context manager.

    ``run`` and ``stream`` raise:
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
        peer_addresses: Mapping[tuple[str, str], str] = MappingProxyType({}),
        in_flight: int | None = None,
    ) -> None:
        """Connects to nothing yet: use ``open``."""
        missing = [machine for machine in program.machines if machine not in endpoints]
        if missing:
            raise InputError(f"the program needs the machines {missing}, and only {sorted(endpoints)} have an address")
        if timeout_seconds <= 0:
            raise InputError(f"a timeout is longer than 0 seconds, got {timeout_seconds}")
        if in_flight is not None and in_flight < 1:
            raise InputError(f"at least one micro-batch has to be in flight, got {in_flight}")
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._workers = DeployedWorkers(program, endpoints, peer_addresses)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._results = ResultQueue(program)
        replicas = max(map(len, program.replicas.values()), default=1)
        links = max(program.depths.values(), default=0) + 1
        queued = UNDER_WAY_PER_LEAD * program.results_lead * replicas + MOST_MORE * links
        self._limit = queued if in_flight is None else in_flight
        # Only stages without inputs compute micro-batches that nobody has submitted.
        self._ahead = 0 if all(stage.inputs for stage in program.stages) else queued
        self._most_activity = {machine: activity_of_one(machine_plan(program, machine)) for machine in program.machines}
        self._last_activity = time.monotonic()
        self._failure: Callable[[], TvmSplitError] | None = None
        self._stream: _Stream | None = None
        self._closed = False
        self._calls: list[LinkCall] = []
        stages = {machine: [stage.name for stage in program.stages_on(machine)] for machine in program.machines}
        self._watch = WorkerWatch(
            self._workers.deployment, self._workers.connections, stages, self._fail, self._worker_moved
        )
        plan = machine_plan(program, CLIENT)
        self._outgoing = {
            machine: self._outgoing_link([route for route in plan.outgoing if route.destination == machine])
            for machine in plan.destinations
        }
        self._incoming = {
            machine: self._incoming_link([route for route in plan.incoming if route.source == machine])
            for machine in plan.sources
        }
        self._period = plan.period
        # Which inputs go where, by the place of a micro-batch in the period: tensor, its place among the inputs, link.
        self._sends = [
            [
                (tensor.name, place, self._outgoing[machine])
                for place, tensor in enumerate(program.inputs)
                for machine in plan.destinations_of(tensor.name, turn)
            ]
            for turn in range(plan.period)
        ]

    def _outgoing_link(self, routes: Sequence[PlannedRoute]) -> OutgoingLink:
        return OutgoingLink(self._lock, routes, flat_bytes, on_room=self._changed.notify_all, on_activity=self._touch)

    def _incoming_link(self, routes: Sequence[PlannedRoute]) -> IncomingLink:
        return IncomingLink(self._lock, routes, array_slot, self._deliver, reuse=False, on_activity=self._touch)

    @classmethod
    def open(
        cls,
        program: Program,
        endpoints: Mapping[str, WorkerEndpoint],
        blob_path: Callable[[str], Path],
        *,
        timeout_seconds: float = 60.0,
        on_progress: TransferProgress | None = None,
        peer_addresses: Mapping[tuple[str, str], str] = MappingProxyType({}),
        in_flight: int | None = None,
    ) -> Pipeline:
        """Sends what the workers lack, loads the stages and connects the machines.

        ``blob_path`` finds the file of a blob by its SHA-256. ``timeout_seconds`` is how long any one step, and later
        any one result, may show no sign of life. ``on_progress`` is called from one thread at a time.
        ``peer_addresses`` by (source, destination) is where one worker reaches another, if not where this process does.
        ``in_flight`` limits the micro-batches between being fed and being taken; by default the queues alone do.

        Raises:
            TvmSplitError: a worker cannot be reached, refuses, or cannot run its stages. Nothing stays behind.
        """
        pipeline = cls(program, endpoints, timeout_seconds, peer_addresses, in_flight)
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
            self._workers.connect(self._timeout_seconds)
            self._open_streams()
        except WorkerError as error:
            raise self._cause_of(error) from error

    def _open_streams(self) -> None:
        for machine, outgoing in self._outgoing.items():
            self._call(machine, CLIENT, machine, outgoing.frames(), outgoing.receive)
        for machine, incoming in self._incoming.items():
            self._call(machine, machine, CLIENT, incoming.credit_frames(), incoming.receive)
        for call in self._calls:
            call.wait_accepted(self._timeout_seconds)

    def _cause_of(self, error: WorkerError) -> TvmSplitError:
        """Why connecting failed: often because something else broke, which the watch hears of at the same time."""
        if not self._watch.wait_report(CAUSE_SECONDS):
            return error
        with self._lock:
            self._changed.wait_for(lambda: self._failure is not None, LONGEST_VERDICT_SECONDS)
            return self._failure() if self._failure is not None else error

    def _call(
        self, machine: str, source: str, destination: str, frames: Iterator[bytes], on_frame: Callable[[Any], None]
    ) -> None:
        endpoint = self._workers.endpoints[machine]
        self._calls.append(
            LinkCall(
                where=str(endpoint),
                address=endpoint.address,
                token=self._workers.connections[machine].token,
                tls=endpoint.tls,
                deployment=self._workers.deployment,
                source=source,
                destination=destination,
                frames=frames,
                on_frame=on_frame,
                on_broken=lambda error: self._watch.link_broken(machine, error),
            )
        )

    @property
    def program(self) -> Program:
        return self._program

    @property
    def blob_bytes_sent(self) -> int:
        """Bytes of libraries and weights that the workers did not have yet."""
        return self._workers.blob_bytes_sent

    def run(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The outputs for one micro-batch, in the program's order."""
        stream = self._begin()
        try:
            sequence = self._submit(stream, checked_inputs(self._program, inputs), self._timeout_seconds)
            result = self._collect(stream, sequence) if sequence is not None else None
            if result is None:
                raise WorkerError("this pipeline was closed while it ran")
            return result
        finally:
            self._end(stream)

    def stream(self, batches: Iterable[Sequence[Array]]) -> Iterator[tuple[Array, ...]]:
        """The outputs for many micro-batches, lazily and in order.

        A thread takes ``batches`` from the iterable as the pipeline has room, so however slow the iterable is, results
        that are ready come out, and however long it is, memory stays bounded. What the iterable raises is raised here,
        after the results before it. A generator that is closed early abandons what is under way.
        """
        stream = self._begin()
        try:
            with self._lock:
                sequence = self._results.submitted
            feeder = threading.Thread(target=self._feed, args=(stream, batches), name="feed", daemon=True)
            feeder.start()
            while (result := self._collect(stream, sequence)) is not None:
                sequence += 1
                yield result
        finally:
            self._end(stream)

    def _begin(self) -> _Stream:
        with self._lock:
            self._check_locked()
            if self._stream is not None:
                raise TvmSplitError(
                    "this pipeline is running a stream already: finish or close that one, or open a second pipeline"
                )
            self._stream = _Stream()
            self._last_activity = time.monotonic()
            return self._stream

    def _end(self, stream: _Stream) -> None:
        with self._lock:
            if self._stream is stream:
                self._stream = None
                self._results.abandon()
            self._changed.notify_all()

    def _feed(self, stream: _Stream, batches: Iterable[Sequence[Array]]) -> None:
        error: BaseException | None = None
        try:
            for batch in batches:
                # A source may use its arrays again as soon as it is asked for the next ones.
                copies = [array.copy() for array in checked_inputs(self._program, batch)]
                if self._submit(stream, copies, None) is None:
                    return
        except BaseException as raised:
            error = raised
        with self._lock:
            stream.ended = True
            stream.error = error
            self._changed.notify_all()

    def _submit(self, stream: _Stream, inputs: Sequence[Array], timeout_seconds: float | None) -> int | None:
        """Queues a micro-batch when there is room for all its inputs; its number, or None if the stream is over."""
        with self._lock:
            while True:
                self._check_locked()
                if self._stream is not stream:
                    return None
                if self._has_room_locked():
                    break
                self._wait_locked(timeout_seconds, self._results.taken)
            if self._results.submitted == self._results.taken:
                self._last_activity = time.monotonic()
            sequence = self._results.submit(inputs)
            for tensor, place, link in self._sends[sequence % self._period]:
                link.put_locked(tensor, sequence, inputs[place])
            self._changed.notify_all()
            return sequence

    def _has_room_locked(self) -> bool:
        under_way = self._results.submitted - self._results.taken
        sends = self._sends[self._results.submitted % self._period]
        return under_way < self._limit and all(link.room_locked(tensor) for tensor, _, link in sends)

    def _collect(self, stream: _Stream, sequence: int) -> tuple[Array, ...] | None:
        """The result for ``sequence``; None when the stream has ended before it."""
        with self._lock:
            while True:
                result = self._results.take(sequence)
                if result is not None:
                    self._changed.notify_all()
                    return result
                self._check_locked()
                submitted = sequence < self._results.submitted
                if stream.ended and not submitted:
                    if stream.error is not None:
                        raise stream.error
                    return None
                self._wait_locked(self._timeout_seconds if submitted else None, sequence)

    def _wait_locked(self, timeout_seconds: float | None, sequence: int) -> None:
        """Waits for a change; with a timeout, only as long as something has moved within it."""
        if timeout_seconds is None:
            self._changed.wait()
            return
        remaining = self._last_activity + timeout_seconds - time.monotonic()
        if remaining <= 0:
            raise DeadlineError(
                f"nothing has moved for {timeout_seconds:g} seconds; waiting for {self._waited_for(sequence)}. "
                "If it only is slow, open the pipeline with a longer timeout"
            )
        self._changed.wait(remaining)

    def _waited_for(self, sequence: int) -> str:
        """The first stage that has its inputs for a micro-batch and has not computed it."""
        finished = self._watch.finished()
        for stage in self._program.stages:
            own = stage.own_turns
            if sequence in own and finished.get((stage.machine, cleaned(stage.name)), 0) <= own.count_before(sequence):
                endpoint = self._workers.endpoints[stage.machine]
                return f"stage {stage.name!r} on {endpoint} to compute micro-batch {sequence}"
        return f"the results of micro-batch {sequence}, which every stage has computed"

    def _deliver(self, route: PlannedRoute, sequence: int, value: Any, release: Callable[[], None]) -> None:
        with self._lock:
            self._results.arrive(route.tensor.name, sequence, value, release)
            self._changed.notify_all()

    def _worker_moved(self, machine: str, activity: int) -> None:
        """Believes a worker as far as what was submitted can have moved it: one that lies must not keep us waiting."""
        if activity <= (self._results.submitted + self._ahead) * self._most_activity[machine]:
            self._touch()

    def _touch(self) -> None:
        self._last_activity = time.monotonic()

    def _fail(self, error: TvmSplitError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = lambda: type(error)(str(error))
            self._halt_locked()

    def _halt_locked(self) -> None:
        for outgoing in self._outgoing.values():
            outgoing.close_locked()
        for incoming in self._incoming.values():
            incoming.close_locked()
        self._changed.notify_all()

    def _check_locked(self) -> None:
        if self._closed:
            raise WorkerError("this pipeline is closed")
        if self._failure is not None:
            raise self._failure()

    def statistics(self) -> tuple[StageStatistics, ...]:
        """What each stage, and each replica of one, has done since ``open``, in the program's order."""
        with self._lock:
            self._check_locked()
        return self._workers.statistics()

    def processor_seconds(self) -> dict[str, float]:
        """By machine, what its worker has used of its cores since it started: computing, transport, everything."""
        with self._lock:
            self._check_locked()
        return self._workers.processor_seconds()

    def trace(self) -> tuple[TraceEvent, ...]:
        """The last events of every machine, by their start, in this process's monotonic clock."""
        with self._lock:
            self._check_locked()
        return self._workers.trace()

    def close(self) -> None:
        """Ends the deployment on all workers. May be called again, also after a failure."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            failed = self._failure is not None
            self._halt_locked()
        if not failed:
            self._workers.unload()
        self._watch.close()
        for call in self._calls:
            call.close()
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def activity_of_one(plan: MachinePlan) -> int:
    """By how much one micro-batch moves a worker's activity at most: `rpc_runtime.program.measurements.Recorder`."""
    moved = (*plan.incoming, *plan.outgoing)
    return sum(max(1, -(-route.tensor.size_bytes // CHUNK_BYTES)) + 1 for route in moved) + 2 * len(plan.stages)
