"""The dispatcher keeps its promise in all orders of feeding, results, failures and late results of earlier links."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from rpc_runtime.client.client_links import ClientLinks
from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.program.program import InputSlice, Program
from rpc_runtime.program.runner import Outputs
from rpc_runtime.wire.framing import credit_frame, decode
from tests.helpers.rpc_runtime.specs import replicas, stage, tensor
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

ENDS = (tensor("x"),), (tensor("y"),)
PROGRAMS = (
    Program(*ENDS, (stage(0, "s", "A", "x", "y"),)),
    Program(*ENDS, (stage(0, "s", "A", "x", "t"), stage(1, "r", "B", "t", "y"))),
    Program(*ENDS, replicas(stage(0, "s", "A", "x", "y"), "AB", "010")),
    Program(*ENDS, (stage(0, "s", "A", "slice", "y"),), input_slices=(InputSlice(tensor("slice"), "x", 0, 0),)),
)


class Machines:
    """The machines behind a placement's links: what was sent to them, and what they have not answered yet."""

    def __init__(self, links: ClientLinks) -> None:
        self._links = links
        self._inputs: dict[str, deque[tuple[int, float]]] = {name: deque() for name in links.outgoing}

    def receive(self) -> bool:
        """Take what is sent; return whether there was anything."""
        is_any = False
        for name, link in self._links.outgoing.items():
            frames: list[bytes] = []
            link.drain(frames.append)
            for frame in map(decode, frames):
                is_any = True
                value = float(np.frombuffer(frame.payload, np.float32)[0])
                self._inputs[name].append((frame.sequence, value))
                (route,) = link.routes
                count = route.when.count_before(frame.sequence + 1)
                link.receive(decode(credit_frame(route.index, count, route.depth)))
        return is_any

    def answer(self, first: int) -> bool:
        """Answer the oldest input of a machine; return whether there was one."""
        waiting = [name for name, inputs in self._inputs.items() if inputs]
        if not waiting:
            return False
        sequence, value = self._inputs[waiting[first % len(waiting)]].popleft()
        link = next(link for link in self._links.incoming.values() if sequence in link.routes[0].when)
        self._links.deliver(link.routes[0], sequence, np.full(2, 2 * value + 1, np.float32), lambda: None)
        return True

    def finish(self) -> None:
        """Answer everything that is sent."""
        self.receive()
        while self.answer(0):
            self.receive()


class OpenStream:
    """A stream that is fed value by value, and whose results a thread takes."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.values: list[float] = []
        self.results: list[float] = []
        self._source: SimpleQueue[float | None] = SimpleQueue()
        self._thread = Thread(target=self._take, args=(dispatcher.stream(self._batches()),), daemon=True)
        self._thread.start()

    def feed(self, value: float) -> None:
        self.values.append(value)
        self._source.put(value)

    def end(self) -> None:
        self._source.put(None)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _batches(self) -> Iterator[list[np.ndarray]]:
        while (value := self._source.get()) is not None:
            yield [np.full(2, value, np.float32)]

    def _take(self, results: Iterator[Outputs]) -> None:
        self.results += [float(outputs[0][0]) for outputs in results]


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(PROGRAMS[0], PATIENCE_SECONDS, lambda sequence: "a result")
        self.machines: Machines | None = None
        self.earlier: list[Machines] = []
        self.calls: list[tuple[float, Future[Outputs]]] = []
        self.streams: list[OpenStream] = []
        self.next_value = 0.0

    def value(self) -> float:
        self.next_value += 1
        return self.next_value

    @precondition(lambda self: self.machines is None)
    @rule(program=st.sampled_from(PROGRAMS))
    def attach(self, program: Program) -> None:
        links = ClientLinks(self.dispatcher, program)
        self.machines = Machines(links)
        self.dispatcher.attach(links, 3)

    @precondition(lambda self: self.machines is not None)
    @rule()
    def fail(self) -> None:
        assert self.machines is not None
        self.dispatcher.detach()
        self.earlier.append(self.machines)
        self.machines = None

    @precondition(lambda self: self.machines is not None)
    @rule(program=st.sampled_from(PROGRAMS), count=st.integers(0, 4), empties=st.booleans())
    def move(self, program: Program, count: int, empties: bool) -> None:
        assert self.machines is not None
        emptied = self.dispatcher.pause()
        while self.machines.receive():
            pass
        self.call()
        if self.streams:
            self.feed(0, count)
        self.machines.answer(0)
        assert not self.machines.receive(), "nothing is fed"
        self.work(0, count)
        if empties:
            self.machines.finish()
            assert emptied.is_set()
        self.fail()
        self.attach(program)

    @rule()
    def call(self) -> None:
        value = self.value()
        self.calls.append((value, self.dispatcher.submit([np.full(2, value, np.float32)])))

    @precondition(lambda self: len(self.streams) < 3)
    @rule()
    def open_stream(self) -> None:
        self.streams.append(OpenStream(self.dispatcher))

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 2), count=st.integers(1, 3))
    def feed(self, number: int, count: int) -> None:
        for _ in range(count):
            self.streams[number % len(self.streams)].feed(self.value())

    @precondition(lambda self: self.machines is not None)
    @rule(first=st.integers(0, 1), count=st.integers(1, 4))
    def work(self, first: int, count: int) -> None:
        assert self.machines is not None
        self.machines.receive()
        for _ in range(count):
            self.machines.answer(first)

    @precondition(lambda self: self.earlier)
    @rule(data=st.data())
    def answer_late(self, data: Any) -> None:
        data.draw(st.sampled_from(self.earlier)).answer(0)

    def teardown(self) -> None:
        if self.machines is None:
            self.attach(PROGRAMS[0])
        for stream in self.streams:
            stream.end()

        def is_finished() -> bool:
            assert self.machines is not None
            self.machines.finish()
            return all(future.done() for _, future in self.calls) and all(s.has_ended for s in self.streams)

        eventually(is_finished, "all results came")
        self.dispatcher.close()
        assert [float(future.result(0)[0][0]) for _, future in self.calls] == [2 * v + 1 for v, _ in self.calls]
        for stream in self.streams:
            assert stream.results == [2 * value + 1 for value in stream.values]


def test_every_result_comes_once_and_in_order() -> None:
    run_state_machine_as_test(DispatcherMachine, settings=settings(stateful_step_count=30, max_examples=5))
