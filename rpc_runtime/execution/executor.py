"""Computes the stages of one machine: one thread, queues before it, links and local queues behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tvm_split.rpc_runtime.execution.stage_order import UNBOUNDED, StageState, Wait, next_action
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
        self._changed = threading.Condition(lock)
        self._stages = tuple(stages)
        self._names = tuple(loaded.stage.name for loaded in stages)
        self._recorder = recorder
        self._on_failure = on_failure
        self._own_turns = [loaded.stage.own_turns for loaded in stages]
        self._finished = [0] * len(stages)
        self._next = [own.nth(0) for own in self._own_turns]
        self._stopped = False
        local = {route.tensor.name: route.queue_depth for route in plan.local}
        self._queues = [
            [_Queue(local.get(tensor.name, UNBOUNDED)) for tensor in loaded.stage.inputs] for loaded in stages
        ]
        # Where a micro-batch goes follows from its place in the period, which is 1 where nothing has replicas.
        self._period = plan.period
        names = {route.tensor.name for route in plan.routes}
        names |= {tensor.name for loaded in stages for tensor in loaded.stage.outputs}
        self._takers = {
            name: [
                [self._queues[position][at] for position, at in plan.consumers(name, place)]
                for place in range(plan.period)
            ]
            for name in names
        }
        self._links: dict[str, list[list[OutgoingLink]]] = {}
        self._ends: tuple[LinkEnd, ...] = ()
        # Whose transfers they are: an outgoing tensor its maker's, an incoming one that of the first stage to take it.
        self._stage_of = {
            SEND: {tensor.name: loaded.stage.name for loaded in stages for tensor in loaded.stage.outputs},
            RECEIVE: {tensor.name: loaded.stage.name for loaded in reversed(stages) for tensor in loaded.stage.inputs},
        }
        self._plan = plan
        self._thread = threading.Thread(target=self._run, name=f"compute-{plan.machine}", daemon=True)

    def start(self, links: Mapping[str, OutgoingLink], sources: Iterable[LinkEnd] = ()) -> None:
        """Begins to compute; ``links`` are those that leave this machine, by their destinations, ``sources`` those
        that end here."""
        self._ends = (*links.values(), *sources)
        self._links = {
            name: [
                [links[destination] for destination in self._plan.destinations_of(name, place)]
                for place in range(self._period)
            ]
            for name in self._takers
        }
        self._thread.start()

    def moved(self) -> None:
        self._recorder.activity += 1

    def transferred(self, kind: str, route: PlannedRoute, sequence: int, start: int, end: int, size_bytes: int) -> None:
        self._recorder.record(kind, self._stage_of[kind][route.tensor.name], sequence, start, end, size_bytes)

    def deliver(self, route: PlannedRoute, sequence: int, value: Any, release: Callable[[], None]) -> None:
        with self.lock:
            if not self._stopped:
                self._give_locked(route.tensor.name, sequence, value, release)

    def room_locked(self) -> None:
        self._changed.notify()

    def progress(self) -> dict[str, int]:
        """Stage name to finished micro-batches of those that are this machine's."""
        return dict(zip(self._names, self._finished, strict=True))

    def stop_locked(self) -> None:
        self._stopped = True
        for queue in (queue for queues in self._queues for queue in queues):
            queue.held.clear()
        self._changed.notify_all()

    def join(self, timeout_seconds: float) -> bool:
        """Whether the computing thread has ended; a kernel that runs cannot be interrupted."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _give_locked(self, tensor: str, sequence: int, value: Any, release: Callable[[], None] | None) -> None:
        takers = self._takers[tensor][sequence % self._period]
        held = _Held(value, len(takers), release)
        for queue in takers:
            queue.put(sequence, held)
        self._changed.notify()

    def _state_locked(self, position: int) -> StageState:
        """Where the stage stands as to its next micro-batch: what is there and fits beyond that is not counted."""
        finished, sequence = self._finished[position], self._next[position]
        queues = self._queues[position]
        arrived = finished + all(sequence in queue.held for queue in queues) if queues else UNBOUNDED
        room = UNBOUNDED
        place = sequence % self._period
        for tensor in self._stages[position].stage.outputs:
            for link in self._links[tensor.name][place]:
                room = min(room, link.room_locked(tensor.name))
            for queue in self._takers[tensor.name][place]:
                room = min(room, max(0, queue.capacity - queue.local))
        return StageState(finished, arrived, room)

    def _run(self) -> None:
        while (chosen := self._choose()) is not None and self._compute(*chosen):
            pass
        with self.lock:
            self._stages = ()  # libraries and weights belong to the thread that used them

    def _choose(self) -> tuple[int, int] | None:
        """Waits for a stage that can run: its position, and its micro-batch; None at the end."""
        idle_since: int | None = None
        with self.lock:
            while not self._stopped:
                action = next_action([self._state_locked(position) for position in range(len(self._stages))])
                if not isinstance(action, Wait):
                    sequence = self._next[action.stage]
                    if idle_since is not None:
                        self._recorder.record(WAIT, self._names[action.stage], sequence, idle_since, now())
                    return action.stage, sequence
                if action.for_inputs and idle_since is None:
                    idle_since = now()
                self._changed.wait()
        return None

    def _compute(self, position: int, sequence: int) -> bool:
        """Runs a stage on a micro-batch, and hands its outputs on; whether it did not raise."""
        loaded = self._stages[position]
        # Inputs keep their places until the stage is done: credits bound the memory, not the queues.
        with self.lock:
            if self._stopped:
                return False
            held = [queue.held[sequence] for queue in self._queues[position]]
        start = now()
        try:
            outputs = loaded.run([each.value for each in held])
        except Exception as error:
            self._on_failure(loaded.stage, error)
            return False
        self._recorder.record(COMPUTE, loaded.stage.name, sequence, start, now())
        self._hand_on(position, sequence, outputs)
        return True

    def _hand_on(self, position: int, sequence: int, outputs: Sequence[Any]) -> None:
        with self.lock:
            if self._stopped:
                return
            self._finished[position] += 1
            self._next[position] = self._own_turns[position].nth(self._finished[position])
            for queue in self._queues[position]:
                queue.take(sequence).done_locked()
            for tensor, value in zip(self._stages[position].stage.outputs, outputs, strict=True):
                for link in self._links[tensor.name][sequence % self._period]:
                    link.put_locked(tensor.name, sequence, value)
                self._give_locked(tensor.name, sequence, value, None)
        for end in self._ends:
            end.flush()
