"""Scheduling of one machine's stages, without threads, locks or clocks: queues, room, and which stage runs next.

Inputs wait in one queue per stage and tensor. A stage is ready when its next micro-batch is in all its queues, and its
outputs have room on links and in queues of this machine. Among the ready stages, the last one in topological order
runs, so that results leave early and queues stay short. Example with three micro-batches, on a machine with the first
and the last of three stages (the middle stage is elsewhere, equally slow)::

    step          1   2   3   4   5   6   7
    this machine  a0  a1  c0  c1  a2  .   c2
    elsewhere     .   b0  b1  .   .   b2  .
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rpc_runtime.program.events import BLOCK, WAIT
from rpc_runtime.program.routes import MachineProgram, Route
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.transports.credits import depths


class Readiness(enum.Enum):
    """Whether a stage can compute its next micro-batch, and if not, why."""

    READY = enum.auto()
    LACKS_INPUTS = enum.auto()
    LACKS_ROOM = enum.auto()
    """Its inputs have arrived, but there is no room for its outputs."""
    AHEAD = enum.auto()
    """It has no inputs, and its next outputs have no room or no consumer."""


class OutgoingQueue(Protocol):
    """What the scheduler uses of an outgoing link. The caller holds the link's lock, if it has one."""

    def has_room_locked(self, tensor: str) -> bool: ...

    def put_locked(self, tensor: str, sequence: int, value: Any) -> None: ...


class _Held:
    """A tensor with a count of the stages of this machine that still need it."""

    __slots__ = ("_release", "_uses", "value")

    def __init__(self, value: Any, uses: int, release: Callable[[], None] | None) -> None:
        self.value = value
        self._uses = uses
        self._release = release

    @property
    def is_local(self) -> bool:
        """Whether the tensor was made on this machine; a received tensor must be released."""
        return self._release is None

    def done(self) -> None:
        self._uses -= 1
        if self._uses == 0 and self._release is not None:
            self._release()


@dataclass
class _Queue:
    """Waiting micro-batches of one input of one stage, by sequence number: one replica may be ahead of another.

    ``capacity`` (at most ``largest``) limits only tensors made on this machine, which ``local`` counts. Received
    tensors are limited by credits: one that arrives early must not use the room of the next one.
    """

    position: int
    capacity: int
    largest: int
    held: dict[int, _Held] = field(default_factory=dict)
    local: int = 0

    @property
    def is_full(self) -> bool:
        return self.local >= self.capacity

    def put(self, sequence: int, held: _Held) -> None:
        self.held[sequence] = held
        self.local += held.is_local

    def take(self, sequence: int) -> _Held:
        held = self.held.pop(sequence)
        self.local -= held.is_local
        return held


@dataclass
class _Consumers:
    """The consumers of an output tensor: links, and queues of this machine."""

    tensor: str
    links: Mapping[str, OutgoingQueue]
    queues: Sequence[_Queue]

    @property
    def full_links(self) -> list[str]:
        """The destinations of the links without room."""
        return [destination for destination, link in self.links.items() if not link.has_room_locked(self.tensor)]

    @property
    def has_room(self) -> bool:
        return not self.full_links and all(not queue.is_full for queue in self.queues)


class Blocked(NamedTuple):
    """A stage with all inputs, but no room for its outputs: on the link to ``destination``, or in its own machine."""

    stage: StageSpec
    sequence: int
    destination: str


class StageState:
    """The state of a stage on its machine. ``outputs`` are by sequence number modulo ``period``.

    ``producers`` are the positions of the stages here that make its inputs: they may become ready after it computes.
    """

    def __init__(self, position: int, stage: StageSpec, queues: Sequence[_Queue]) -> None:
        self.position = position
        self.stage = stage
        self.queues = queues
        self.outputs: Mapping[int, Sequence[_Consumers]] = {}
        self.period = 1
        self.producers: Sequence[int] = ()
        self.finished = 0
        self.sequence = stage.micro_batches.nth(0)

    @property
    def inputs(self) -> list[Any]:
        """The inputs of the next micro-batch. They stay queued until the stage is done: credits limit memory."""
        return [queue.held[self.sequence].value for queue in self.queues]

    def next_outputs(self) -> Sequence[_Consumers]:
        return self.outputs[self.sequence % self.period]

    @property
    def full(self) -> list[_Queue]:
        """The queues of this machine that have no room for the next micro-batch."""
        return [queue for output in self.next_outputs() for queue in output.queues if queue.is_full]

    def advance(self) -> None:
        self.finished += 1
        self.sequence = self.stage.micro_batches.nth(self.finished)

    @property
    def readiness(self) -> Readiness:
        """Whether the stage can compute its next micro-batch; later micro-batches are ignored."""
        for queue in self.queues:
            if self.sequence not in queue.held:
                return Readiness.LACKS_INPUTS
        outputs = self.next_outputs()
        has_room = all(output.has_room for output in outputs)
        if self.queues:
            return Readiness.READY if has_room else Readiness.LACKS_ROOM
        is_taken = any(output.links or output.queues for output in outputs)  # else the stage would run for ever
        return Readiness.READY if has_room and is_taken else Readiness.AHEAD


class Scheduler:
    """All stages of a machine; ``on_ready`` is called when a stage becomes ready."""

    def __init__(self, program: MachineProgram, on_ready: Callable[[], None]) -> None:
        local = {route.tensor.name: depths(route) for route in program.local}
        self._on_ready = on_ready
        self._stages = [
            StageState(position, stage, [_Queue(position, *local.get(tensor.name, (0, 0))) for tensor in stage.inputs])
            for position, stage in enumerate(program.stages)
        ]
        self._readiness = [Readiness.LACKS_INPUTS for _ in program.stages]
        self._blocked: set[int] = set()
        """Positions of stages that lack room or are ahead."""
        # A micro-batch's consumers depend on its sequence number modulo the period, which is 1 without replicas.
        self._period = program.period
        self._consumers: dict[str, dict[int, list[_Queue]]] = {}
        for state in self._stages:
            for tensor, queue in zip(state.stage.inputs, state.queues, strict=True):
                consumers = self._consumers.setdefault(tensor.name, {})
                for sequence in state.stage.micro_batches.within(program.period):
                    consumers.setdefault(sequence, []).append(queue)
        self._program = program
        self.latest_source = ""
        """The machine from which the latest tensor was received."""

    def __iter__(self) -> Iterator[StageState]:
        """Yield the stages in topological order."""
        return iter(self._stages)

    def connect(self, links: Mapping[str, OutgoingQueue]) -> None:
        """Set the outgoing links, by destination. Call before `begin`."""
        for state in self._stages:
            stage = state.stage
            state.period = self._period
            state.outputs = {
                sequence: [
                    _Consumers(
                        tensor.name,
                        {name: links[name] for name in self._program.destinations_of(tensor.name, sequence)},
                        self._consumers.get(tensor.name, {}).get(sequence, ()),
                    )
                    for tensor in stage.outputs
                ]
                for sequence in stage.micro_batches.within(self._period)
            }
            inputs = {tensor.name for tensor in stage.inputs}
            state.producers = [
                producer.position
                for producer in self._stages
                if inputs & {tensor.name for tensor in producer.stage.outputs}
            ]

    def begin(self) -> None:
        """Start scheduling; stages without inputs become ready."""
        self._update(range(len(self._stages)))

    def next_stage(self) -> StageState | None:
        """Return the stage to compute now; None if none can run.

        If only lack of room in the machine's own queues blocks all stages, the queues are enlarged first.
        """
        stage = self._last_ready()
        return self._last_ready() if stage is None and self._widen() else stage

    def blocked(self) -> Blocked | None:
        """Return the last stage that waits only for room for its outputs; None if all stages wait for inputs."""
        for state in reversed(self._stages):
            if self._readiness[state.position] is Readiness.LACKS_ROOM:
                full = [destination for output in state.next_outputs() for destination in output.full_links]
                return Blocked(state.stage, state.sequence, full[0] if full else state.stage.machine)
        return None

    def _last_ready(self) -> StageState | None:
        ready = (stage for stage in reversed(self._stages) if self._readiness[stage.position] is Readiness.READY)
        return next(ready, None)

    def _widen(self) -> bool:
        """Enlarge by one the full queues that block a stage while their consumers wait for other inputs.

        Returns whether any stage was blocked in that way. The queues stay short: the producers of the missing inputs
        depend on the same source, which sends them no more than their links have room for.
        """
        held_up = [position for position in self._blocked if self._is_held_up_by_queues(position)]
        for queue in {id(queue): queue for position in held_up for queue in self._stages[position].full}.values():
            queue.capacity += 1
        self._update(held_up)
        return bool(held_up)

    def _is_held_up_by_queues(self, position: int) -> bool:
        """Return whether a stage lacks only room in queues that may be enlarged."""
        state = self._stages[position]
        return (
            self._readiness[position] is Readiness.LACKS_ROOM
            and not any(output.full_links for output in state.next_outputs())
            and all(
                queue.capacity < queue.largest and self._readiness[queue.position] is Readiness.LACKS_INPUTS
                for queue in state.full
            )
        )

    def give(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Queue a received tensor; ``release`` is called once, when all stages have used it."""
        self.latest_source = route.source
        self._give(self._consumers[route.tensor.name].get(sequence % self._period, ()), sequence, value, release)

    def starves(self, tensor: str, sequence: int) -> bool:
        """Return whether no stage is ready, and a stage that consumes this tensor lacks inputs."""
        return Readiness.READY not in self._readiness and any(
            self._readiness[queue.position] is Readiness.LACKS_INPUTS
            for queue in self._consumers[tensor].get(sequence % self._period, ())
        )

    def finish(self, state: StageState, outputs: Sequence[Any]) -> None:
        """Record that a stage has computed its next micro-batch; queue its outputs for links and local stages."""
        sequence, consumers = state.sequence, state.next_outputs()
        state.advance()
        for queue in state.queues:
            queue.take(sequence).done()
        for output, value in zip(consumers, outputs, strict=True):
            for link in output.links.values():
                link.put_locked(output.tensor, sequence, value)
            self._give(output.queues, sequence, value, None)
        self._update((*state.producers, state.position))

    def room(self) -> None:
        """Update blocked stages, because a link has room for one more micro-batch of a tensor."""
        if self._blocked:
            self._update(tuple(self._blocked))

    def clear(self) -> None:
        """Drop all queued tensors."""
        for queue in (queue for state in self._stages for queue in state.queues):
            queue.held.clear()

    def _give(self, consumers: Sequence[_Queue], sequence: int, value: Any, release: Callable[[], None] | None) -> None:
        held = _Held(value, len(consumers), release)
        for queue in consumers:
            queue.put(sequence, held)
        self._update([queue.position for queue in consumers])

    def _update(self, positions: Iterable[int]) -> None:
        """Update the readiness of these stages."""
        for position in positions:
            readiness = self._stages[position].readiness
            if readiness is self._readiness[position]:
                continue
            self._readiness[position] = readiness
            if readiness is Readiness.READY:
                self._on_ready()
            if readiness in (Readiness.LACKS_ROOM, Readiness.AHEAD):
                self._blocked.add(position)
            else:
                self._blocked.discard(position)


class Idle(NamedTuple):
    """An interval without a ready stage: `WAIT` for a tensor from ``peer``, or `BLOCK` until ``peer`` took one."""

    kind: str
    stage: str
    sequence: int
    peer: str
    since: Any


class IdleTimes:
    """Finds out why a machine is idle; moments may be in any unit."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since: Any = None
        self._blocked: Blocked | None = None

    def update(self, state: StageState | None, moment: Any) -> Idle | None:
        """Note the stage that runs from ``moment`` on (None: no stage); return the idle interval that ends, or None."""
        blocked = None if state is not None else self._scheduler.blocked()
        ended: Idle | None = None
        if self._since is not None and (state is not None or blocked != self._blocked):
            following = blocked if state is None else state
            if self._blocked is not None:
                stage, sequence, destination = self._blocked
                ended = Idle(BLOCK, stage.name, sequence, destination, self._since)
            elif following is not None:
                source = self._scheduler.latest_source
                ended = Idle(WAIT, following.stage.name, following.sequence, source, self._since)
            self._since = None
        if state is None and self._since is None:
            self._since, self._blocked = moment, blocked
        return ended
