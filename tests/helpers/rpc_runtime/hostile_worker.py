"""A gRPC server that imitates a worker: it answers every method as the test says."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from rpc_runtime.processes import Closing
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import LINK_PATH, WorkerEndpoint
from rpc_runtime.wire.framing import PROTOCOL_VERSION, FrameKind, control_frame
from rpc_runtime.wire.server import CONTROL_SERVICE
from tests.helpers.rpc_runtime.raw_calls import METHODS

Answer = Callable[[Iterator[bytes], Any], Iterator[bytes]]
"""Returns the answer to a call, from its requests and its context."""


def describes_itself(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    yield pb.DescribeReply(protocol_version=PROTOCOL_VERSION).SerializeToString()


def says_nothing_more(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """Accept a data stream."""
    accept = pb.Accept(answer=pb.Offer(transport="grpc"))
    yield control_frame(FrameKind.ACCEPT, accept.SerializeToString())
    yield from (b"" for _ in requests if False)


def is_there(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """Send heartbeats on a watch, without other events."""
    while context.is_active():
        yield pb.WatchEvent().SerializeToString()
        time.sleep(0.2)


def is_content(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """Return an empty message, which is a valid reply of every other method."""
    yield b""


class HostileWorker(Closing, grpc.GenericRpcHandler):  # type: ignore[misc]
    """Listens on loopback. ``answers`` is by the method's path; without it, it acts as a worker that does nothing."""

    def __init__(self, machine: str, answers: dict[str, Answer] | None = None) -> None:
        self.answers: dict[str, Answer] = {
            METHODS["Describe"].path: describes_itself,
            METHODS["Watch"].path: is_there,
            LINK_PATH: says_nothing_more,
        }
        self.answers.update(answers or {})
        self._server = grpc.server(ThreadPoolExecutor(64), handlers=(self,))
        self.endpoint = WorkerEndpoint(machine, f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}")
        self._server.start()

    def service(self, handler_call_details: Any) -> Any:
        assert handler_call_details.method.startswith((f"/{CONTROL_SERVICE}/", LINK_PATH))
        answer = self.answers.get(handler_call_details.method, is_content)
        return grpc.stream_stream_rpc_method_handler(answer)

    def close(self) -> None:
        self._server.stop(0).wait(5)
