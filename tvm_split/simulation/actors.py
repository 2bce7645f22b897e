"""Machines, links and the client in simulated time. The runtime's own code decides what each of them does next."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import simpy

from rpc_runtime.client.result_queue import ResultQueue
from rpc_runtime.execution.scheduler import IdleTimes, Scheduler, StageState
from rpc_runtime.program.events import COMPUTE, RECEIVE, SEND, Observation, Recorder
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT, MachineProgram, Route
from rpc_runtime.transports.credits import Grants, Outbox, SendItem
from tvm_split.simulation.processors import Processors
from tvm_split.simulation.scenario import LinkTimes

Steps = Generator[simpy.Event, None, None]
NOTHING = np.empty(0, np.uint8)
"""Stands for the value of every tensor."""


class Clock:
    """Simulated time and random durations. Nanoseconds are for the runtime's rules, which count in them."""

    def __init__(self, environment: simpy.Environment, seed: int) -> None:
        self.environment = environment
        self._random = random.Random(seed)  # noqa: S311 (no secret)

    @property
    def seconds(self) -> float:
        return float(self.environment.now)

    @property
    def nanoseconds(self) -> int:
        return round(self.environment.now * 1e9)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``seconds``; immediately if they are not above 0."""
        if seconds <= 0:
            action()
        else:
            self.environment.timeout(seconds).callbacks.append(lambda _: action())

    def scattered(self, seconds: float, scatter: float) -> float:
        """A random log-normal duration with mean ``seconds`` and standard deviation ``scatter * seconds``."""
        if not scatter:
            return seconds
        variance = math.log1p(scatter * scatter)
        return seconds * self._random.lognormvariate(-variance / 2, math.sqrt(variance))


class Records:
    """Records the events of the first ``micro_batches`` micro-batches in the form that machines use."""

    def __init__(self, clock: Clock, micro_batches: int) -> None:
        self._clock = clock
        self._count = micro_batches
        self._recorders: defaultdict[str, Recorder] = defaultdict(Recorder)

    def record(
        self,
        machine: str,
        stage: str,
        sequence: int,
        kind: str,
        start: float,
        size_bytes: int = 0,
        peer: str = "",
        tensor: str = "",
    ) -> None:
        """Record an event that began at ``start`` (seconds) and ends now."""
        if sequence < self._count:
            recorder = self._recorders[machine]
            track = recorder.track(kind, stage, peer, tensor)
            recorder.record(track, sequence, round(start * 1e9), self._clock.nanoseconds, size_bytes)

    def observe(self) -> dict[str, Observation]:
        """Return what was recorded, by machine."""
        return {machine: recorder.observe(since=0) for machine, recorder in self._recorders.items()}


class Resting:
    """A condition on which one process waits until `rouse` is called."""

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment
        self._roused: simpy.Event | None = None

    def rest(self) -> simpy.Event:
        self._roused = self._environment.event()
        return self._roused

    def rouse(self) -> None:
        if self._roused is not None:
            roused, self._roused = self._roused, None
            roused.succeed()


@dataclass(eq=False)
class Link:
    """A one-way link: the runtime's own flow control at its two ends, and a wire with a latency between them."""

    clock: Clock
    routes: Sequence[Route]
    times: LinkTimes
    scatter: float
    source: Worker | Client
    target: Worker | Client
    is_cut: bool = False

    def __post_init__(self) -> None:
        self._routes = {route.index: route for route in self.routes}
        self._outbox, self._grants = Outbox(self.routes), Grants(self.routes)
        self._resting = Resting(self.clock.environment)
        self._last_arrival = 0.0
        if self.times.shares_memory:
            for index in self._routes:
                for window in (self._outbox.window(index), self._grants.window(index)):
                    window.largest = window.depth

    def has_room_locked(self, tensor: str) -> bool:
        return self._outbox.has_room(tensor)

    def put_locked(self, tensor: str, sequence: int, value: object) -> None:
        self._outbox.put(tensor, sequence, value)
        self._resting.rouse()

    def run(self) -> Steps:
        while True:
            item = None if self.is_cut else self._outbox.next(self.clock.nanoseconds)
            if item is None:
                yield self._resting.rest()
                continue
            start, route = self.clock.seconds, self._routes[item.tensor_index]
            wire = self.clock.scattered(self.times.wire_seconds.get(route.tensor.name, 0.0), self.scatter)
            latency = self.clock.scattered(self.times.latency_seconds, self.scatter)
            # Tensors arrive in the order in which they leave.
            latency = max(latency, self._last_arrival - start - wire)
            self._last_arrival = start + wire + latency
            if wire > 0:
                yield self.clock.environment.timeout(wire)
            self._outbox.sent(item.tensor_index)
            self.source.sent(route, item.sequence, start)
            self.clock.later(latency, lambda sent=item, at=start + latency: self._complete(sent, at))  # type: ignore[misc]
            self.source.room()

    def _complete(self, item: SendItem, start: float) -> None:
        if self.is_cut:
            return
        route = self._routes[item.tensor_index]
        if not self._grants.window(item.tensor_index).may_arrive:
            raise RuntimeError(f"a micro-batch of {route} came without a credit")
        starves = item.waited and self.target.starves(route, item.sequence)
        if self._grants.arrive(item.tensor_index, item.waited, starves):
            self._tell()
        self.target.received(route, item.sequence, start, lambda: self._release(item.tensor_index))

    def _release(self, tensor_index: int) -> None:
        self._grants.consume(tensor_index)
        self._tell()

    def _tell(self) -> None:
        granted = list(self._grants.due())
        if granted:
            self.clock.later(self.times.latency_seconds, lambda: self._credit(granted))

    def _credit(self, granted: Sequence[tuple[int, int, int]]) -> None:
        for index, consumed, depth in granted:
            self._outbox.window(index).credit(consumed, depth, self.clock.nanoseconds)
        self._resting.rouse()


ACTIVITIES = ("compute", "wait", "block")
"""What a machine does all the time: a part of `MachineUse` for each."""


@dataclass(eq=False)
class Worker:
    """A machine with its stages.

    ``seconds(stage, moment)`` returns the seconds to compute a stage from ``moment`` (seconds) on, without contention.
    """

    clock: Clock
    trace: Records
    plan: MachineProgram
    processors: Processors
    seconds: Callable[[str, float], float]
    scatter: float
    is_lost: bool = False

    def __post_init__(self) -> None:
        self._resting = Resting(self.clock.environment)
        self.scheduler = Scheduler(self.plan, self._resting.rouse)
        self._sender = {tensor.name: stage.name for stage in self.plan.stages for tensor in stage.outputs}
        self._consumer = {tensor.name: stage.name for stage in reversed(self.plan.stages) for tensor in stage.inputs}
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._doing, self._since = "wait", 0.0

    def connect(self, links: Mapping[str, Link]) -> None:
        self.scheduler.connect(links)

    def sent(self, route: Route, sequence: int, start: float) -> None:
        stage, size_bytes = self._sender[route.tensor.name], route.tensor.size_bytes
        self.trace.record(
            self.plan.machine, stage, sequence, SEND, start, size_bytes, route.destination, route.tensor.name
        )

    def received(self, route: Route, sequence: int, start: float, release: Callable[[], None]) -> None:
        stage, size_bytes = self._consumer[route.tensor.name], route.tensor.size_bytes
        self.trace.record(
            self.plan.machine, stage, sequence, RECEIVE, start, size_bytes, route.source, route.tensor.name
        )
        if not self.is_lost:
            self.scheduler.give(route, sequence, NOTHING, release)

    def room(self) -> None:
        self.scheduler.room()

    def starves(self, route: Route, sequence: int) -> bool:
        return self.scheduler.starves(route.tensor.name, sequence)

    def lose(self, moment: float) -> None:
        """Stop the machine at ``moment`` (seconds), after all simulated events and before the next one."""
        if not self.is_lost:
            self._does(self._doing, moment)
            self.is_lost = True

    def spent(self) -> dict[str, float]:
        """The seconds of each activity until now, or until the machine was lost."""
        if not self.is_lost:
            self._does(self._doing, self.clock.seconds)
        return dict(self._spent)

    def _does(self, what: str, moment: float) -> None:
        self._spent[self._doing] += moment - self._since
        self._doing, self._since = what, moment

    def run(self) -> Steps:
        self.scheduler.begin()
        idle_times = IdleTimes(self.scheduler)
        while not self.is_lost:
            state = self.scheduler.next_stage()
            if (idle := idle_times.update(state, self.clock.seconds)) is not None:
                self.trace.record(self.plan.machine, idle.stage, idle.sequence, idle.kind, idle.since, peer=idle.peer)
            if state is None:
                is_blocked = self.scheduler.blocked() is not None
                self._does("block" if is_blocked else "wait", self.clock.seconds)
                yield self._resting.rest()
                continue
            yield from self._compute(state)

    def _compute(self, state: StageState) -> Steps:
        start, sequence = self.clock.seconds, state.sequence
        self._does("compute", start)
        seconds = self.seconds(state.stage.name, start)
        yield self.processors.work(self.plan.machine, self.clock.scattered(seconds, self.scatter))
        if self.is_lost:
            return
        self.trace.record(self.plan.machine, state.stage.name, sequence, COMPUTE, start)
        self.scheduler.finish(state, [NOTHING] * len(state.stage.outputs))


@dataclass
class Client:
    """Feeds micro-batches and takes results like a single stream, with at most ``limit`` micro-batches in flight.

    ``submitted`` and ``done`` are times in seconds, by the number of the micro-batch. ``seconds`` is the time of the
    client's cores per micro-batch. ``on_done`` is called with the number of results after each one.
    """

    clock: Clock
    program: Program
    plan: MachineProgram
    processors: Processors
    limit: int
    seconds: float
    on_done: Callable[[int], None]
    submitted: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._results = ResultQueue(self.program)
        self._resting = Resting(self.clock.environment)
        self._sends = self.plan.sends(self.program.client_tensors)

    def connect(self, links: Mapping[str, Link]) -> None:
        self.links = links

    def feed(self, count: int | None) -> Steps:
        """Feed ``count`` micro-batches, or an endless stream if it is None."""
        inputs = [NOTHING] * len(self.program.inputs)
        for number in itertools.count() if count is None else range(count):
            if self.seconds > 0:
                yield self.processors.work(CLIENT, self.seconds)
            sends = self._sends[number % len(self._sends)]
            while number - self._results.taken >= self.limit or not all(
                self.links[machine].has_room_locked(tensor) for tensor, _, machine in sends
            ):
                yield self._resting.rest()
            self._results.submit(inputs)
            self.submitted.append(self.clock.seconds)
            for tensor, _, machine in sends:
                self.links[machine].put_locked(tensor, number, NOTHING)

    def room(self) -> None:
        self._resting.rouse()

    def starves(self, route: Route, sequence: int) -> bool:
        return True

    def sent(self, route: Route, sequence: int, start: float) -> None:
        """Do nothing: sending by the client is not recorded."""

    def received(self, route: Route, sequence: int, start: float, release: Callable[[], None]) -> None:
        self._results.arrive(route.tensor.name, sequence, NOTHING, release)
        while self._results.take() is not None:
            self.done.append(self.clock.seconds)
            self.on_done(len(self.done))
        self._resting.rouse()
