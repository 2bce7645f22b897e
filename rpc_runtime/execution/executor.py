"""Computes the stages of one machine in one thread, from input queues to links and local queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpc_runtime.execution.observed_stage import ObservedStage
from rpc_runtime.execution.scheduler import IdleTimes, Scheduler, StageState
from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, WINDOW, Recorder, now
from rpc_runtime.program.routes import MachineProgram, Route
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.sleeper import Due, Sleeper, do_due
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.links import OutgoingLink

if TYPE_CHECKING:
    from rpc_runtime.execution.loaded_stage import LoadedStage


class StageExecutor:
    """Runs stages as soon as their inputs have arrived and their outputs have room. It is the links' `LinkOwner`.

    If a stage raises, ``on_failure(stage, error)`` is called once, from the computing thread; no stage runs after that.
    """

    device = None

    def __init__(
        self,
        lock: threading.Lock,
        program: MachineProgram,
        stages: Sequence[LoadedStage],
        recorder: Recorder,
        on_failure: Callable[[StageSpec, Exception], None],
    ) -> None:
        self.lock = lock
        self._due: Due = Due()
        self._computer = Sleeper(self._due)
        """The thread that computes."""
        self._recorder = recorder
        self._on_failure = on_failure
        self._stopped = False
        self._stages = tuple(ObservedStage(stage, recorder) for stage in stages)
        self._scheduler = Scheduler(program, self._computer.rouse_locked)
        self._ends: list[tuple[LinkEnd, ...]] = []
        """By the position of a stage: the links to flush after it has computed."""
        # The stage that a transfer is counted for: the producer of a sent tensor, the first consumer of a received one.
        producers = {tensor.name: stage.name for stage in program.stages for tensor in stage.outputs}
        consumers = {tensor.name: stage.name for stage in reversed(program.stages) for tensor in stage.inputs}
        self._computing = [recorder.track(COMPUTE, stage.name) for stage in program.stages]
        self._tracks = {
            (kind, route): recorder.track(kind, stage_of[route.tensor.name], getattr(route, end), route.tensor.name)
            for routes, stage_of, end, kinds in (
                (program.outgoing, producers, "destination", [SEND]),
                (program.incoming, consumers, "source", [RECEIVE, WINDOW]),
            )
            for route in routes
            for kind in kinds
        }
        self._idle_times = IdleTimes(self._scheduler)
        self._program = program
        self._thread = threading.Thread(target=self._run, name=f"compute-{program.machine}", daemon=True)

    def start(self, links: Mapping[str, OutgoingLink], sources: Mapping[str, LinkEnd]) -> None:
        """Start computing. ``links``: the outgoing links by destination; ``sources``: the incoming links by source."""
        self._scheduler.connect(links)
        for state in self._scheduler:
            outputs, inputs = ({tensor.name for tensor in side} for side in (state.stage.outputs, state.stage.inputs))
            ends: list[LinkEnd] = [
                links[route.destination] for route in self._program.outgoing if route.tensor.name in outputs
            ]
            ends += [sources[route.source] for route in self._program.incoming if route.tensor.name in inputs]
            self._ends.append(tuple(dict.fromkeys(ends)))
        self._thread.start()

    def moved(self) -> None:
        self._recorder.activity += 1

    def transferred(
        self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int, under_way: int
    ) -> None:
        self._recorder.record(self._tracks[kind, route], sequence, start, end, size_bytes, under_way)

    def widened(self, route: Route, sequence: int, depth: int) -> None:
        moment = now()
        self._recorder.record(self._tracks[WINDOW, route], sequence, moment, moment, 0, depth)

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        with self.lock:
            if not self._stopped:
                self._scheduler.give(route, sequence, value, release)
        self.wake()

    def room_locked(self) -> None:
        self._scheduler.room()

    def wake(self) -> None:
        do_due(self._due)

    def starves_locked(self, route: Route, sequence: int) -> bool:
        return self._scheduler.starves(route.tensor.name, sequence)

    def record_kernels(self, micro_batches: int) -> None:
        """Record the kernels of the next ``micro_batches`` of each stage."""
        for stage in self._stages:
            stage.record_next(micro_batches)

    def progress(self) -> dict[str, int]:
        """Return the number of micro-batches that each stage of this machine has finished, by stage name."""
        return {state.stage.name: state.finished for state in self._scheduler}

    def stop_locked(self) -> None:
        self._stopped = True
        self._scheduler.clear()
        self._computer.wake()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the computing thread; return whether it has ended. A running kernel cannot be interrupted."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self.lock:
                self._scheduler.begin()
            while (next_one := self._next_stage()) is not None and self._compute(*next_one):
                pass
        finally:
            self._stages = ()  # frees libraries and weights in the thread that used them

    def _next_stage(self) -> tuple[StageState, list[Any]] | None:
        """Wait for a stage that can run; return it with its inputs, or None after a stop."""
        while True:
            with self.lock:
                if self._stopped:
                    return None
                state, moment = self._scheduler.next_stage(), now()
                if (idle := self._idle_times.update(state, moment)) is not None:
                    track = self._recorder.track(idle.kind, idle.stage, idle.peer)
                    self._recorder.record(track, idle.sequence, idle.since, moment)
                if state is not None:
                    return state, state.inputs
                self._computer.rest_locked()
            self._computer.sleep()

    def _compute(self, state: StageState, values: list[Any]) -> bool:
        """Run a stage on its next micro-batch and pass its outputs on; return False at the end: a failure or a stop."""
        start = now()
        try:
            outputs = self._stages[state.position].run(values, state.sequence)
        except Exception as error:
            self._on_failure(state.stage, error)
            return False
        values.clear()
        self._recorder.record(self._computing[state.position], state.sequence, start, now())
        with self.lock:
            if self._stopped:
                return False
            self._scheduler.finish(state, outputs)
        for end in self._ends[state.position]:
            end.flush()
        return True
