"""The calling end of a link in its own process; it sends or receives until it is killed.

``python -m tests.helpers.rpc_runtime.link_peer ADDRESS TRANSPORT send|receive BYTES``
"""

import sys
import threading
from collections.abc import Callable

import numpy as np

from rpc_runtime.program.routes import Route
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.worker.runtime_alone import load_runtime
from tests.helpers.rpc_runtime.joined_links import SHORT, Calling, Receiver, Sender


def one_route(size_bytes: int) -> Route:
    return Route(0, TensorSpec("x", (size_bytes,), "uint8"), "a", "b", 3)


def print_ready() -> None:
    print("ready", flush=True)


def main(address: str, transport: str, role: str, size_bytes: str, ready: Callable[[], None] = print_ready) -> None:
    if transport == "nccl":
        load_runtime()
    route = one_route(int(size_bytes))
    endpoint = WorkerEndpoint("answering", address)
    if role == "receive":
        calling = Calling(endpoint, Receiver([route], SHORT).link, transport)
        ready()
    else:
        sender = Sender([route], SHORT)
        calling = Calling(endpoint, sender.link, transport)
        ready()
        threading.Thread(target=calling.ended.wait).start()
        sequence = 0
        while not calling.ended.is_set():
            sequence += sender.put("x", sequence, np.full(int(size_bytes), sequence % 251, np.uint8), 0.2)
    calling.ended.wait()
    calling.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
