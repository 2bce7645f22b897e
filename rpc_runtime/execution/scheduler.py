"""The rules by which one machine's stages compute, without threads, locks and clocks: queues, room, whose turn it is.

Inputs wait in one queue a stage and tensor; a stage may compute when its next micro-batch is in all of them and its
outputs have room, on links and in queues of this machine. Of the stages that may, the last one in topological order
does: it drains what is nearest to the output, so results leave early and queues stay short. With three micro-batches,
on a machine that holds the first and the last stage of three (the middle one elsewhere, equally slow)::

    step          1   2   3   4   5   6   7
    this machine  a0  a1  c0  c1  a2  .   c2
    elsewhere     .   b0  b1  .   .   b2  .
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rpc_runtime.program.program import StageSpec
from rpc_runtime.program.routes import MachineProgram
from rpc_runtime.transports.credits import depths


class Readiness(enum.Enum):
    """Where a stage stands as to its next micro-batch."""

    READY = enum.auto()
    LACKS_INPUTS = enum.auto()
    LACKS_ROOM = enum.auto()
    """Its inputs are there, but not a place for its outputs."""
    AHEAD = enum.auto()
    """It takes no inputs, and has computed as far as somebody takes its outputs."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the next micro-batch of the stage at position ``stage`` on the machine."""

    stage: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can run: ``for_inputs`` when every stage lacks inputs, else outputs must leave first."""

    for_inputs: bool


Action = Compute | Wait


def next_action(stages: Sequence[Readiness]) -> Action:
    """The action for ``stages``, which are in topological order."""
    for position in range(len(stages) - 1, -1, -1):
        if stages[position] is Readiness.READY:
            return Compute(position)
    return Wait(for_inputs=Readiness.LACKS_ROOM not in stages)


class Leaving(Protocol):
    """A link that tensors leave by. The caller holds whatever lock there is."""

    def has_room_locked(self, tensor: str) -> bool: ...

    def put_locked(self, tensor: str, sequence: int, value: Any) -> None: ...


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

    def done(self) -> None:
        self._uses -= 1
        if self._uses == 0 and self._release is not None:
            self._release()


@dataclass
class _Queue:
    """Waiting micro-batches of one input of one stage, by their numbers: of several replicas, one may be ahead.

    ``capacity``, which may be ``largest``, counts only for tensors made on this machine, and so does ``local``: credits
    limit the others, and what came ahead must not take the place of what is next.
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
class _Exit:
    """Where a tensor goes that a stage has made: links, and queues of this machine."""

    tensor: str
    links: Sequence[Leaving]
    takers: Sequence[_Queue]

    @property
    def has_room(self) -> bool:
        return all(link.has_room_locked(self.tensor) for link in self.links) and all(
            not taker.is_full for taker in self.takers
        )


class StageState:
    """A stage on its machine. ``exits`` are by the place in the ``period`` of a micro-batch that it computes.

    When it has computed, it may compute again, and those at the positions ``makers`` that make its inputs here.
    """

    def __init__(self, position: int, stage: StageSpec, queues: Sequence[_Queue]) -> None:
        self.position = position
        self.stage = stage
        self.queues = queues
        self.exits: Mapping[int, Sequence[_Exit]] = {}
        self.period = 1
        self.makers: Sequence[int] = ()
        self.finished = 0
        self.sequence = stage.own_turns.nth(0)

    @property
    def inputs(self) -> list[Any]:
        """Of the next micro-batch. They keep their places until the stage is done: credits bound the memory."""
        return [queue.held[self.sequence].value for queue in self.queues]

    def next_exits(self) -> Sequence[_Exit]:
        return self.exits[self.sequence % self.period]

    @property
    def full(self) -> list[_Queue]:
        """Queues of this machine that have no room for the next micro-batch."""
        return [queue for each in self.next_exits() for queue in each.takers if queue.is_full]

    def advance(self) -> None:
        self.finished += 1
        self.sequence = self.stage.own_turns.nth(self.finished)

    @property
    def readiness(self) -> Readiness:
        """What is there and fits beyond the next micro-batch is not counted."""
        for queue in self.queues:
            if self.sequence not in queue.held:
                return Readiness.LACKS_INPUTS
        exits = self.next_exits()
        has_room = all(each.has_room for each in exits)
        if self.queues:
            return Readiness.READY if has_room else Readiness.LACKS_ROOM
        is_taken = any(each.links or each.takers for each in exits)  # else nothing would end it
        return Readiness.READY if has_room and is_taken else Readiness.AHEAD


class Scheduler:
    """All stages of a machine; ``on_ready`` is called when one may compute that could not before."""

    def __init__(self, plan: MachineProgram, on_ready: Callable[[], None]) -> None:
        local = {route.tensor.name: depths(route) for route in plan.local}
        self._on_ready = on_ready
        self._stages = [
            StageState(position, stage, [_Queue(position, *local.get(tensor.name, (0, 0))) for tensor in stage.inputs])
            for position, stage in enumerate(plan.stages)
        ]
        self._readiness = [Readiness.LACKS_INPUTS for _ in plan.stages]
        self._blocked: set[int] = set()
        """Positions of stages that lack room, or are ahead."""
        # Where a micro-batch goes follows from its place in the period, which is 1 where nothing has replicas.
        self._period = plan.period
        self._takers: dict[str, dict[int, list[_Queue]]] = {}
        for state in self._stages:
            for tensor, queue in zip(state.stage.inputs, state.queues, strict=True):
                takers = self._takers.setdefault(tensor.name, {})
                for place in state.stage.own_turns.within(plan.period):
                    takers.setdefault(place, []).append(queue)
        self._plan = plan

    def __iter__(self) -> Iterator[StageState]:
        """In topological order."""
        return iter(self._stages)

    def connect(self, links: Mapping[str, Leaving]) -> None:
        """Before anything computes; ``links`` are those that leave this machine, by their destinations."""
        for state in self._stages:
            stage = state.stage
            state.period = self._period
            state.exits = {
                place: [
                    _Exit(
                        tensor.name,
                        [links[destination] for destination in self._plan.destinations_of(tensor.name, place)],
                        self._takers.get(tensor.name, {}).get(place, ()),
                    )
                    for tensor in stage.outputs
                ]
                for place in stage.own_turns.within(self._period)
            }
            taken = {tensor.name for tensor in stage.inputs}
            state.makers = [
                other.position for other in self._stages if taken & {tensor.name for tensor in other.stage.outputs}
            ]

    def begin(self) -> None:
        """Stages without inputs may compute now."""
        self._look_again(range(len(self._stages)))

    def next_action(self) -> Action:
        """What the machine does next. Where it had nothing to do but for want of room in its own queues, they widen."""
        action = next_action(self._readiness)
        if isinstance(action, Wait) and self._widen():
            action = next_action(self._readiness)
        return action

    def _widen(self) -> bool:
        """Gives one more place to queues of this machine that hold a stage up while their takers wait for something
        else; whether to any.

        So much that is of no use cannot be made: whoever makes what the takers wait for has inputs from where these are
        from, and no more of them than its links have room for.
        """
        held_up = [position for position in self._blocked if self._is_held_up_by_queues(position)]
        for queue in {id(queue): queue for position in held_up for queue in self._stages[position].full}.values():
            queue.capacity += 1
        self._look_again(held_up)
        return bool(held_up)

    def _is_held_up_by_queues(self, position: int) -> bool:
        """Whether a stage lacks nothing but room in queues that may be widened."""
        state = self._stages[position]
        return (
            self._readiness[position] is Readiness.LACKS_ROOM
            and all(link.has_room_locked(each.tensor) for each in state.next_exits() for link in each.links)
            and all(
                queue.capacity < queue.largest and self._readiness[queue.position] is Readiness.LACKS_INPUTS
                for queue in state.full
            )
        )

    def at(self, position: int) -> StageState:
        return self._stages[position]

    def give(self, tensor: str, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """A tensor has come from another machine; ``release`` is called once, when all stages have used it."""
        self._give(self._takers[tensor].get(sequence % self._period, ()), sequence, value, release)

    def starves(self, tensor: str, sequence: int) -> bool:
        """Whether nothing can compute, and a stage that takes this tensor could if it had its inputs."""
        return Readiness.READY not in self._readiness and any(
            self._readiness[queue.position] is Readiness.LACKS_INPUTS
            for queue in self._takers[tensor].get(sequence % self._period, ())
        )

    def finish(self, position: int, outputs: Sequence[Any]) -> None:
        """A stage has computed its next micro-batch."""
        state = self._stages[position]
        sequence, exits = state.sequence, state.next_exits()
        state.advance()
        for queue in state.queues:
            queue.take(sequence).done()
        for each, value in zip(exits, outputs, strict=True):
            for link in each.links:
                link.put_locked(each.tensor, sequence, value)
            self._give(each.takers, sequence, value, None)
        self._look_again((*state.makers, state.position))

    def room(self) -> None:
        """Some link has room for one more micro-batch of a tensor."""
        if self._blocked:
            self._look_again(tuple(self._blocked))

    def clear(self) -> None:
        """Whatever waits is no longer needed."""
        for queue in (queue for state in self._stages for queue in state.queues):
            queue.held.clear()

    def _give(self, takers: Sequence[_Queue], sequence: int, value: Any, release: Callable[[], None] | None) -> None:
        held = _Held(value, len(takers), release)
        for queue in takers:
            queue.put(sequence, held)
        self._look_again([queue.position for queue in takers])

    def _look_again(self, positions: Iterable[int]) -> None:
        """Brings the states of these stages up to date."""
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
