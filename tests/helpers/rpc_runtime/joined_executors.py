"""Executors of several machines and a client, joined by links without a network."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpc_runtime.client.client_links import ClientLinks
from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.client.result_queue import array_slot
from rpc_runtime.errors import WorkerError
from rpc_runtime.execution.executor import StageExecutor
from rpc_runtime.program.events import Recorder
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.program.specs import StageSpec
from rpc_runtime.transports.links import IncomingLink, OutgoingLink
from rpc_runtime.wire.framing import decode
from tests.helpers.waiting import PATIENCE_SECONDS


class PlainStage:
    """A stage that weights its inputs by their positions, so that mixed-up tensors or micro-batches show."""

    def __init__(self, stage: StageSpec) -> None:
        self.stage = stage

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        total = np.full(2, self.stage.index + 1, np.int64)
        for place, array in enumerate(inputs):
            total = total * 3 + array * (place + 2)
        return [total + place for place in range(len(self.stage.outputs))]


def evaluate(program: Program, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    values = {spec.name: array for spec, array in zip(program.inputs, inputs, strict=True)}
    for stage, *_ in program.replicas.values():
        outputs = PlainStage(stage).run([values[t.name] for t in stage.inputs])
        values.update(zip((t.name for t in stage.outputs), outputs, strict=True))
    return [values[t.name] for t in program.outputs]


@dataclass
class Ends:
    """The owner of a machine's links, how its values become bytes, and its memory slots."""

    owner: Any
    as_bytes: Callable[[Any], Any] = flat_bytes
    make_slot: Any = array_slot


class Joined:
    """All machines of a program and its client in one process, with a thread per direction of each link."""

    def __init__(
        self,
        program: Program,
        make_stage: Callable[[StageSpec], Any] = PlainStage,
        ends_of: Callable[[StageExecutor], Ends] = Ends,
    ) -> None:
        self.client = Dispatcher(program, PATIENCE_SECONDS, lambda sequence: "a result")
        links = ClientLinks(self.client, program)
        self.failures: list[BaseException] = []
        self.executors: dict[str, StageExecutor] = {}
        self.threads: list[threading.Thread] = []
        plans = {name: program.on(name) for name in program.machines}
        for name, plan in plans.items():
            stages = [make_stage(stage) for stage in plan.stages]
            recorder = Recorder()
            self.executors[name] = StageExecutor(
                threading.Lock(), plan, stages, recorder, lambda stage, error: self.failures.append(error)
            )
        self.outgoing = {(CLIENT, machine): link for machine, link in links.outgoing.items()}
        self.incoming = {(machine, CLIENT): link for machine, link in links.incoming.items()}
        for name, plan in plans.items():
            ends = ends_of(self.executors[name])
            for peer, routes in plan.by_destination.items():
                self.outgoing[name, peer] = OutgoingLink(ends.owner, routes, ends.as_bytes, ends.make_slot)
            for peer, routes in plan.by_source.items():
                self.incoming[peer, name] = IncomingLink(ends.owner, routes, ends.make_slot, reuse=True)
        for pair, link in self.outgoing.items():
            self._thread(link.frames(), self.incoming[pair].receive)
            self._thread(self.incoming[pair].frames(), link.receive)
        for name, executor in self.executors.items():
            executor.start(
                {destination: link for (source, destination), link in self.outgoing.items() if source == name},
                {source: link for (source, destination), link in self.incoming.items() if destination == name},
            )
        self.client.attach(links)

    def _thread(self, frames: Any, receive: Callable[[Any], None]) -> None:
        def pump() -> None:
            try:
                for message in frames:
                    receive(decode(message))
            except BaseException as error:
                self.failures.append(error)
                self.client.fail(WorkerError(repr(error)))

        self.threads.append(threading.Thread(target=pump, daemon=True))
        self.threads[-1].start()

    def close(self) -> None:
        self.client.close()
        for link in (*self.outgoing.values(), *self.incoming.values()):
            link.close()
        for executor in self.executors.values():
            with executor.lock:
                executor.stop_locked()
        for executor in self.executors.values():
            assert executor.join(PATIENCE_SECONDS)
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


def check(program: Program, count: int, *parts: Any) -> None:
    """Stream micro-batches through all machines, made of ``parts``, and compare with running the stages in order."""
    batches = [[np.array([n, 7 * n + i]) for i in range(len(program.inputs))] for n in range(count)]
    joined = Joined(program, *parts)
    try:
        results = list(joined.client.stream(batches))
    finally:
        joined.close()
    assert not joined.failures
    for stage in program.stages:
        assert joined.executors[stage.machine].progress()[stage.name] <= stage.micro_batches.count_before(count)
    for batch, result in zip(batches, results, strict=True):
        expected = evaluate(program, batch)
        assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))
