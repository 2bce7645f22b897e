"""The rules by which one machine's stages compute, without threads, locks and clocks: queues, room, whose turn it is.

Inputs wait in one queue a stage and tensor; a stage may compute when its next micro-batch is in all of them and its
outputs have room, on links and in queues of this machine. Which one then does says `stage_order.next_action`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rpc_runtime.execution.stage_order import Action, StageState, Wait, next_action
from rpc_runtime.program.program import StageSpec
from rpc_runtime.program.routes import MachineProgram
from rpc_runtime.transports.credits import depths


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


class Station:
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
    def state(self) -> StageState:
        """What is there and fits beyond the next micro-batch is not counted."""
        for queue in self.queues:
            if self.sequence not in queue.held:
                return StageState.LACKS_INPUTS
        exits = self.next_exits()
        has_room = all(each.has_room for each in exits)
        if self.queues:
            return StageState.READY if has_room else StageState.LACKS_ROOM
        is_taken = any(each.links or each.takers for each in exits)  # else nothing would end it
        return StageState.READY if has_room and is_taken else StageState.AHEAD


class Stations:
    """All stages of a machine; ``on_ready`` is called when one may compute that could not before."""

    def __init__(self, plan: MachineProgram, on_ready: Callable[[], None]) -> None:
        local = {route.tensor.name: depths(route) for route in plan.local}
        self._on_ready = on_ready
        self._stations = [
            Station(position, stage, [_Queue(position, *local.get(tensor.name, (0, 0))) for tensor in stage.inputs])
            for position, stage in enumerate(plan.stages)
        ]
        self._states = [StageState.LACKS_INPUTS for _ in plan.stages]
        self._blocked: set[int] = set()
        """Positions of stages that lack room, or are ahead."""
        # Where a micro-batch goes follows from its place in the period, which is 1 where nothing has replicas.
        self._period = plan.period
        self._takers: dict[str, dict[int, list[_Queue]]] = {}
        for station in self._stations:
            for tensor, queue in zip(station.stage.inputs, station.queues, strict=True):
                takers = self._takers.setdefault(tensor.name, {})
                for place in station.stage.own_turns.within(plan.period):
                    takers.setdefault(place, []).append(queue)
        self._plan = plan

    def __iter__(self) -> Iterator[Station]:
        """In topological order."""
        return iter(self._stations)

    def connect(self, links: Mapping[str, Leaving]) -> None:
        """Before anything computes; ``links`` are those that leave this machine, by their destinations."""
        for station in self._stations:
            stage = station.stage
            station.period = self._period
            station.exits = {
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
            station.makers = [
                other.position for other in self._stations if taken & {tensor.name for tensor in other.stage.outputs}
            ]

    def begin(self) -> None:
        """Stages without inputs may compute now."""
        self._look_again(range(len(self._stations)))

    def next_action(self) -> Action:
        """What the machine does next. Where it had nothing to do but for want of room in its own queues, they widen."""
        action = next_action(self._states)
        if isinstance(action, Wait) and self._widen():
            action = next_action(self._states)
        return action

    def _widen(self) -> bool:
        """Gives one more place to queues of this machine that hold a stage up while their takers wait for something
        else; whether to any.

        So much that is of no use cannot be made: whoever makes what the takers wait for has inputs from where these are
        from, and no more of them than its links have room for.
        """
        held_up = [position for position in self._blocked if self._is_held_up_by_queues(position)]
        for queue in {id(queue): queue for position in held_up for queue in self._stations[position].full}.values():
            queue.capacity += 1
        self._look_again(held_up)
        return bool(held_up)

    def _is_held_up_by_queues(self, position: int) -> bool:
        """Whether a stage lacks nothing but room in queues that may be widened."""
        station = self._stations[position]
        return (
            self._states[position] is StageState.LACKS_ROOM
            and all(link.has_room_locked(each.tensor) for each in station.next_exits() for link in each.links)
            and all(
                queue.capacity < queue.largest and self._states[queue.position] is StageState.LACKS_INPUTS
                for queue in station.full
            )
        )

    def at(self, position: int) -> Station:
        return self._stations[position]

    def give(self, tensor: str, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """A tensor has come from another machine; ``release`` is called once, when all stages have used it."""
        self._give(self._takers[tensor].get(sequence % self._period, ()), sequence, value, release)

    def starves(self, tensor: str, sequence: int) -> bool:
        """Whether nothing can compute, and a stage that takes this tensor could if it had its inputs."""
        return StageState.READY not in self._states and any(
            self._states[queue.position] is StageState.LACKS_INPUTS
            for queue in self._takers[tensor].get(sequence % self._period, ())
        )

    def finish(self, position: int, outputs: Sequence[Any]) -> None:
        """A stage has computed its next micro-batch."""
        station = self._stations[position]
        sequence, exits = station.sequence, station.next_exits()
        station.advance()
        for queue in station.queues:
            queue.take(sequence).done()
        for each, value in zip(exits, outputs, strict=True):
            for link in each.links:
                link.put_locked(each.tensor, sequence, value)
            self._give(each.takers, sequence, value, None)
        self._look_again((*station.makers, station.position))

    def room(self) -> None:
        """Some link has room for one more micro-batch of a tensor."""
        if self._blocked:
            self._look_again(tuple(self._blocked))

    def clear(self) -> None:
        """Whatever waits is no longer needed."""
        for queue in (queue for station in self._stations for queue in station.queues):
            queue.held.clear()

    def _give(self, takers: Sequence[_Queue], sequence: int, value: Any, release: Callable[[], None] | None) -> None:
        held = _Held(value, len(takers), release)
        for queue in takers:
            queue.put(sequence, held)
        self._look_again([queue.position for queue in takers])

    def _look_again(self, positions: Iterable[int]) -> None:
        """Brings the states of these stages up to date."""
        for position in positions:
            state = self._stations[position].state
            if state is self._states[position]:
                continue
            self._states[position] = state
            if state is StageState.READY:
                self._on_ready()
            if state in (StageState.LACKS_ROOM, StageState.AHEAD):
                self._blocked.add(position)
            else:
                self._blocked.discard(position)
