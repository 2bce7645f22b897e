"""For any messages of a peer that shares memory, this end stops in time and gives a reason."""

import contextlib
import gc
import os
import queue
import random
import socket
import struct
from collections.abc import Iterator

import grpc
import numpy as np

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.transports import shared_memory
from rpc_runtime.transports.liveness import LinkTimeouts
from rpc_runtime.transports.shared_memory import MESSAGE, SECRET_BYTES, new_memory
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH
from rpc_runtime.wire.framing import FrameKind, control_frame, credit_frame, decode, parsed, shared_tensor_frame
from tests.helpers.mappings import open_files
from tests.helpers.mutations import mutated, random_frame
from tests.helpers.rpc_runtime.joined_links import DEPLOYMENT, Answering, Receiver, Sender
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.rpc_runtime.raw_calls import RawCaller
from tests.helpers.trials import Trials
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

ROUTE = one_route(1000)
TIMEOUTS = LinkTimeouts(beat_seconds=0.1, silence_seconds=0.4, choice_seconds=0.5, handshake_seconds=0.5)


def hostile_frames(source: random.Random) -> list[bytes]:
    """Return random frames, some of them valid."""
    frames = []
    for sequence in range(source.choice((0, 1, 3, 30))):
        match source.randrange(3):
            case 0:
                size = source.choice((ROUTE.tensor.size_bytes,) * 5 + (0, 2**63))
                frames.append(shared_tensor_frame(0, sequence, source.choice((sequence % 3, 0, 3, 2**40)), size))
            case 1:
                places = [source.randrange(4) for _ in range(source.choice((0, 1, 1, 3, 500)))]
                frames.append(credit_frame(0, source.choice((sequence, 0, 2**40)), 3, places))
            case _:
                frames.append(random_frame(source, sequence, source.choice((0, 4, 5000))))
    return [mutated(frame, source) if source.random() < 0.1 else frame for frame in frames]


def memory(source: random.Random) -> list[int]:
    """Return what is sent in place of the memory's descriptors; usually valid memory."""
    match source.randrange(7):
        case 0:
            return []
        case 1:
            descriptor = os.memfd_create("unsealed")
            os.ftruncate(descriptor, 3 * 1024)
            return [descriptor]
        case 2:
            return [os.open("/dev/zero", os.O_RDWR)]
    with new_memory([one_route(2000) if source.random() < 0.2 else ROUTE]) as file:
        return [os.dup(file.fileno())]


def attack(answering: Answering, receives: bool, source: random.Random) -> None:
    """Run one caller, which mostly follows the handshake."""
    offer = pb.Offer(transport="shm", offer=shared_memory.host_proof(DEPLOYMENT))
    hello = pb.Hello(deployment=DEPLOYMENT, source="a", destination="b", offers=[offer])
    requests: queue.Queue[bytes | None] = queue.Queue()

    def speaking() -> Iterator[bytes]:
        while (message := requests.get()) is not None:
            yield message

    with contextlib.ExitStack() as until_end:
        caller = until_end.enter_context(RawCaller(answering.endpoint))
        until_end.callback(requests.put, None)
        call = caller.begin(LINK_PATH, speaking(), 20, ((HELLO_KEY, hello.SerializeToString()),))
        until_end.callback(call.cancel)
        answer = parsed(pb.Accept, decode(next(call))).answer.offer
        secret = answer[:SECRET_BYTES] if source.random() < 0.9 else source.randbytes(source.choice((0, 1, 32)))
        name = answer[SECRET_BYTES:].decode()
        connection = until_end.enter_context(shared_memory.call(name, secret, PATIENCE_SECONDS))
        if source.random() < 0.9:
            requests.put(control_frame(FrameKind.CHOICE, pb.Choice(transport="shm").SerializeToString()))
        else:
            requests.put(mutated(control_frame(FrameKind.CHOICE, source.randbytes(3)), source))
        with contextlib.suppress(OSError, struct.error):
            connection.settimeout(1)
            if receives:
                descriptors = memory(source)
                try:
                    message = source.choice((MESSAGE, MESSAGE, MESSAGE, b"x", MESSAGE + b"x"))
                    socket.send_fds(connection, [message], descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
            else:
                _, descriptors, _, _ = socket.recv_fds(connection, 1000, 4)
                for descriptor in descriptors:
                    os.close(descriptor)
            for frame in hostile_frames(source):
                connection.send(frame)
        with contextlib.suppress(grpc.RpcError):
            if source.random() < 0.5:
                requests.put(source.randbytes(10))


def trial(source: random.Random) -> str:
    """Return how a link with one such caller ends. After the return, no frame of an error keeps memory alive."""
    receives = source.random() < 0.5  # the caller, so that this end sends
    sender, receiver = Sender([ROUTE], TIMEOUTS), Receiver([ROUTE], TIMEOUTS)
    with contextlib.closing(Answering(sender.link if receives else receiver.link)) as answering:
        if receives:
            sender.put("x", 0, np.zeros(ROUTE.tensor.size_bytes, np.uint8))
        with contextlib.suppress(grpc.RpcError, TvmSplitError):
            attack(answering, receives, source)
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert isinstance(answering.ends[0], TvmSplitError), answering.ends[0]
        return type(answering.ends[0]).__name__


def test_a_hostile_neighbour(trials: Trials) -> None:
    files = open_files()
    for _ in trials:
        trials.found[trial(trials.source)] += 1
    eventually(lambda: gc.collect() >= 0 and open_files() <= files, "no file is left open")
