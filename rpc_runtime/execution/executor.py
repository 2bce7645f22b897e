"""Computes the stages of one machine: one thread, queues before it, links and local queues behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from tvm_split.rpc_runtime.execution.stage_order import StageState, Wait, next_action
from tvm_split.rpc_runtime.program.machine_plan import MachinePlan, PlannedRoute
from tvm_split.rpc_runtime.program.measurements import COMPUTE, RECEIVE, SEND, WAIT, Recorder, now
from tvm_split.rpc_runtime.program.program import StageSpec
from tvm_split.rpc_runtime.transports.link_end import LinkEnd
from tvm_split.rpc_runtime.transports.links import OutgoingLink


class RunnableStage(Protocol):
    """A stage that is loaded."""

    @property
    def stage(self) -> StageSpec: ...

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The stage's outputs, in memory that no later call changes."""
        ...


class _Held:
    """A tensor that several stages of the machine may still need."""

    __slots__ = ("_release", "_uses", "value")

    def __init__(self, value: Any, uses: int, release: Callable[[], None] | None) -> None:
        self.value = value
        self._uses = uses
        self._release = release

    @property
    def is_local(self) -> bool:
        """Whether it was made on this machine; what came from another one has to be released."""
        return self._release is None

    def done_locked(self) -> None:
        self._uses -= 1
        if self._uses == 0 and self._release is not None:
            self._release()


@dataclass
class _Queue:
    """Waiting micro-batches of one input of one stage, by their numbers: of several replicas, one may be ahead.

    ``capacity`` counts only for tensors made on this machine, and so does ``local``: credits limit the others, and what
    came ahead must not take the place of what is next.
    """

    position: int
    capacity: int
    held: dict[int, _Held] = field(default_factory=dict)
    local: int = 0

    def put(self, sequence: int, held: _Held) -> None:
        self.held[sequence] = held
        self.local += held.is_local

    def take(self, sequence: int) -> _Held:
        held = self.held.pop(sequence)
        self.local -= held.is_local
        return held


@dataclass
class _Exit:
    """Where a tensor goes that a stage has made: links, and queues of this machine."""

    tensor: str
    links: Sequence[OutgoingLink]
    takers: Sequence[_Queue]

    @property
    def has_room_locked(self) -> bool:
        return all(link.has_room_locked(self.tensor) for link in self.links) and all(
            taker.local < taker.capacity for taker in self.takers
        )


class _Station:
    """A stage on its machine. ``exits`` are by the place of a micro-batch in the period.

    When it has computed, the links of ``ends`` may have something to say, and it, and those at the positions ``makers``
    that make its inputs here, may compute again.
    """

    def __init__(self, position: int, stage: StageSpec, queues: Sequence[_Queue]) -> None:
        self.position = position
        self.stage = stage
        self.queues = queues
        self.exits: Sequence[Sequence[_Exit]] = ()
        self.ends: Sequence[LinkEnd] = ()
        self.makers: Sequence[int] = ()
        self.finished = 0
        self.sequence = stage.own_turns.nth(0)

    def next_exits(self) -> Sequence[_Exit]:
        return self.exits[self.sequence % len(self.exits)]

    def advance(self) -> None:
        self.finished += 1
        self.sequence = self.stage.own_turns.nth(self.finished)

    def state_locked(self) -> StageState:
        """What is there and fits beyond the next micro-batch is not counted."""
        for queue in self.queues:
            if self.sequence not in queue.held:
                return StageState.LACKS_INPUTS
        exits = self.next_exits()
        has_room = all(each.has_room_locked for each in exits)
        if self.queues:
            return StageState.READY if has_room else StageState.LACKS_ROOM
        is_taken = any(each.links or each.takers for each in exits)  # else nothing would end it
        return StageState.READY if has_room and is_taken else StageState.AHEAD


class StageExecutor:
    """Runs stages as soon as their inputs are there and their outputs have room: the station of its machine's links.

    ``on_failure(stage, error)`` is called once, from the computing thread, when a stage raises; nothing runs after.
    """

    def __init__(
        self,
        lock: threading.Lock,
        plan: MachinePlan,
        stages: Sequence[RunnableStage],
        recorder: Recorder,
        on_failure: Callable[[StageSpec, Exception], None],
    ) -> None:
        self.lock = lock
        # The computing thread waits here: a queue, which is in C, wakes it sooner than a condition, which is in Python.
        self._roused: SimpleQueue[None] = SimpleQueue()
        self._rests = False
        self._recorder = recorder
        self._on_failure = on_failure
        self._stopped = False
        local = {route.tensor.name: route.queue_depth for route in plan.local}
        self._stages = tuple(stages)
        self._stations = [
            _Station(position, stage, [_Queue(position, local.get(tensor.name, 0)) for tensor in stage.inputs])
            for position, stage in enumerate(plan.stages)
        ]
        self._states = [StageState.LACKS_INPUTS for _ in stages]
        self._blocked: set[int] = set()
        """Positions of stages that lack room, or are ahead."""
        # Where a micro-batch goes follows from its place in the period, which is 1 where nothing has replicas.
        self._period = plan.period
        names = {route.tensor.name for route in plan.routes}
        names |= {tensor.name for stage in plan.stages for tensor in stage.outputs}
        self._takers = {
            name: [
                [self._stations[position].queues[at] for position, at in plan.consumers(name, place)]
                for place in range(plan.period)
            ]
            for name in names
        }
        # Whose transfers they are: an outgoing tensor its maker's, an incoming one that of the first stage to take it.
        self._stage_of = {
            SEND: {tensor.name: stage.name for stage in plan.stages for tensor in stage.outputs},
            RECEIVE: {tensor.name: stage.name for stage in reversed(plan.stages) for tensor in stage.inputs},
        }
        self._plan = plan
        self._thread = threading.Thread(target=self._run, name=f"compute-{plan.machine}", daemon=True)

    def start(self, links: Mapping[str, OutgoingLink], sources: Mapping[str, LinkEnd]) -> None:
        """Begins to compute; ``links`` are those that leave this machine, by their destinations, ``sources`` those
        that end here, by their sources."""
        for station in self._stations:
            stage = station.stage
            station.exits = [
                [
                    _Exit(
                        tensor.name,
                        [links[destination] for destination in self._plan.destinations_of(tensor.name, place)],
                        self._takers[tensor.name][place],
                    )
                    for tensor in stage.outputs
                ]
                for place in range(self._period)
            ]
            taken = {tensor.name for tensor in stage.inputs}
            ends: list[LinkEnd] = [link for exits in station.exits for each in exits for link in each.links]
            ends += [sources[route.source] for route in self._plan.incoming if route.tensor.name in taken]
            station.ends = tuple(dict.fromkeys(ends))
            station.makers = [
                other.position for other in self._stations if taken & {tensor.name for tensor in other.stage.outputs}
            ]
        self._thread.start()

    def moved(self) -> None:
        self._recorder.activity += 1

    def transferred(self, kind: str, route: PlannedRoute, sequence: int, start: int, end: int, size_bytes: int) -> None:
        self._recorder.record(kind, self._stage_of[kind][route.tensor.name], sequence, start, end, size_bytes)

    def deliver(self, route: PlannedRoute, sequence: int, value: Any, release: Callable[[], None]) -> None:
        with self.lock:
            if not self._stopped:
                self._give_locked(self._takers[route.tensor.name][sequence % self._period], sequence, value, release)

    def room_locked(self) -> None:
        if self._blocked:
            self._look_again_locked(tuple(self._blocked))

    def progress(self) -> dict[str, int]:
        """Stage name to finished micro-batches of those that are this machine's."""
        return {station.stage.name: station.finished for station in self._stations}

    def stop_locked(self) -> None:
        self._stopped = True
        for queue in (queue for station in self._stations for queue in station.queues):
            queue.held.clear()
        self._rouse_locked()

    def join(self, timeout_seconds: float) -> bool:
        """Whether the computing thread has ended; a kernel that runs cannot be interrupted."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _give_locked(
        self, takers: Sequence[_Queue], sequence: int, value: Any, release: Callable[[], None] | None
    ) -> None:
        held = _Held(value, len(takers), release)
        for queue in takers:
            queue.put(sequence, held)
        self._look_again_locked([queue.position for queue in takers])

    def _look_again_locked(self, positions: Iterable[int]) -> None:
        """Brings the states of these stages up to date; wakes the computing thread where there is more to do."""
        for position in positions:
            state = self._stations[position].state_locked()
            if state is self._states[position]:
                continue
            self._states[position] = state
            if state is StageState.READY:
                self._rouse_locked()
            if state in (StageState.LACKS_ROOM, StageState.AHEAD):
                self._blocked.add(position)
            else:
                self._blocked.discard(position)

    def _rouse_locked(self) -> None:
        if self._rests:
            self._rests = False
            self._roused.put(None)

    def _run(self) -> None:
        with self.lock:
            self._look_again_locked(range(len(self._stations)))
        while (next_one := self._next_station()) is not None and self._compute(*next_one):
            pass
        with self.lock:
            self._stages = ()  # libraries and weights belong to the thread that used them

    def _next_station(self) -> tuple[_Station, list[Any]] | None:
        """Waits for a stage that can run, and gives its inputs, too; None at the end."""
        idle_since: int | None = None
        while True:
            with self.lock:
                if self._stopped:
                    return None
                action = next_action(self._states)
                if not isinstance(action, Wait):
                    station = self._stations[action.stage]
                    if idle_since is not None:
                        self._recorder.record(WAIT, station.stage.name, station.sequence, idle_since, now())
                    # Inputs keep their places until the stage is done: credits bound the memory, not the queues.
                    return station, [queue.held[station.sequence].value for queue in station.queues]
                if action.for_inputs and idle_since is None:
                    idle_since = now()
                self._rests = True
            self._roused.get()

    def _compute(self, station: _Station, values: list[Any]) -> bool:
        """Runs a stage on its next micro-batch, and hands its outputs on; whether it did not raise."""
        start = now()
        try:
            outputs = self._stages[station.position].run(values)
        except Exception as error:
            self._on_failure(station.stage, error)
            return False
        values.clear()
        self._recorder.record(COMPUTE, station.stage.name, station.sequence, start, now())
        self._hand_on(station, outputs)
        return True

    def _hand_on(self, station: _Station, outputs: Sequence[Any]) -> None:
        with self.lock:
            if self._stopped:
                return
            sequence, exits = station.sequence, station.next_exits()
            station.advance()
            for queue in station.queues:
                queue.take(sequence).done_locked()
            for each, value in zip(exits, outputs, strict=True):
                for link in each.links:
                    link.put_locked(each.tensor, sequence, value)
                self._give_locked(each.takers, sequence, value, None)
            self._look_again_locked((*station.makers, station.position))
        for end in station.ends:
            end.flush()
