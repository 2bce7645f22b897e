"""The order in which the client feeds micro-batches, without a network."""

from concurrent.futures import Future
from functools import partial

import numpy as np

from rpc_runtime.client.dispatcher import Dispatcher
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
    dispatcher = Dispatcher(program, PATIENCE_SECONDS, 2, lambda sequence: "a result")
    (to_worker,), (from_worker,) = dispatcher.outgoing.values(), dispatcher.incoming.values()
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
        dispatcher.deliver(from_worker.routes[0], sequence, y, lambda: None)
    assert [int(result.result(0)[0][0]) for result in results if not result.cancelled()] == [0, 1, 2, 3, 4]
    dispatcher.close()
