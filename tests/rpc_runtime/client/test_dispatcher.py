"""The order in which the client feeds micro-batches, without a network."""

import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event

import numpy as np
import pytest

from rpc_runtime.client.client_links import ClientLinks
from rpc_runtime.client.dispatcher import Dispatcher
from rpc_runtime.errors import WorkerError, WorkerUnavailableError
from rpc_runtime.program.program import Program
from rpc_runtime.program.runner import Outputs
from rpc_runtime.transports.links import OutgoingLink
from rpc_runtime.wire.framing import credit_frame, decode
from tests.helpers.rpc_runtime.specs import stage, tensor
from tests.helpers.waiting import PATIENCE_SECONDS, eventually


def fed_until(link: OutgoingLink, sent: list[bytes], count: int) -> bool:
    link.drain(sent.append)
    return len(sent) >= count


def test_micro_batches_are_fed_in_the_order_in_which_they_were_submitted() -> None:
    """With room for two, each result makes room for the micro-batch that has waited longest, and for no other."""
    program = Program((tensor("x"),), (tensor("y"),), (stage(0, "s", "A", "x", "y"),))
    dispatcher = Dispatcher(program, PATIENCE_SECONDS, lambda sequence: "a result")
    links = ClientLinks(dispatcher, program)
    dispatcher.attach(links, 2)
    (to_worker,), (from_worker,) = links.outgoing.values(), links.incoming.values()
    sent: list[bytes] = []
    results: list[Future[Outputs]] = []
    for number in range(6):
        results.append(dispatcher.submit([np.full(2, number, np.float32)]))
    results[3].cancel()
    for sequence, fed in enumerate(([0, 1], [2], [4], [5], [])):
        sent.clear()
        eventually(partial(fed_until, to_worker, sent, len(fed)), "the micro-batches that there is room for are fed")
        assert [np.frombuffer(decode(frame).payload, np.float32)[0] for frame in sent] == fed
        (route,) = to_worker.routes
        to_worker.receive(decode(credit_frame(route.index, sequence + 1, route.depth)))
        y = np.full(2, sequence, np.float32)
        links.deliver(from_worker.routes[0], sequence, y, lambda: None)
    assert [int(result.result(0)[0][0]) for result in results if not result.cancelled()] == [0, 1, 2, 3, 4]
    dispatcher.close()


def test_closing_ends_a_stream_that_waits_for_its_source() -> None:
    """Results that came before are given first, also while the source of the next inputs never answers."""
    program = Program((tensor("x"),), (tensor("y"),), (stage(0, "s", "A", "x", "y"),))
    dispatcher = Dispatcher(program, PATIENCE_SECONDS, lambda sequence: "a result")
    links = ClientLinks(dispatcher, program)
    dispatcher.attach(links)
    (from_worker,), asked, ended = links.incoming.values(), Event(), Event()

    def source() -> Iterator[list[np.ndarray]]:
        yield [np.zeros(2, np.float32)]
        asked.set()
        ended.wait(PATIENCE_SECONDS)

    results = dispatcher.stream(source())
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(next, results)
        assert asked.wait(PATIENCE_SECONDS)
        links.deliver(from_worker.routes[0], 0, np.ones(2, np.float32), lambda: None)
        assert first.result(PATIENCE_SECONDS)[0].tolist() == [1, 1]
        following = threads.submit(next, results)
        dispatcher.close()
        with pytest.raises(WorkerError, match="closed"):
            following.result(PATIENCE_SECONDS)
        ended.set()


def test_outputs_of_incomplete_results_are_not_kept() -> None:
    """They are views of memory that a failed link shares with a worker."""
    stages = (stage(0, "s", "A", "x", "y"), stage(1, "t", "B", "x", "z"))
    program = Program((tensor("x"),), (tensor("y"), tensor("z")), stages)
    dispatcher = Dispatcher(program, PATIENCE_SECONDS, lambda sequence: "a result")
    links = ClientLinks(dispatcher, program)
    dispatcher.attach(links)
    result = dispatcher.submit([np.zeros(2, np.float32)])
    y = np.ones(2, np.float32)
    arrived = weakref.ref(y)
    (route,) = links.incoming["A"].routes
    links.deliver(route, 0, y, lambda: None)
    del y
    assert arrived() is not None
    dispatcher.fail(WorkerUnavailableError("B has gone"))
    assert arrived() is None
    assert isinstance(result.exception(0), WorkerUnavailableError)
    dispatcher.close()
