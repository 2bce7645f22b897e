"""Transports are offered to whom they may be, chosen in time, and what goes wrong before is told."""

from __future__ import annotations

import re
import resource
import socket
from contextlib import closing

import pytest

from rpc_runtime.errors import ProtocolError, WorkerError
from rpc_runtime.program.link_setting import Transport
from rpc_runtime.transports import link_answer
from rpc_runtime.transports.link_answer import LinkAnswer
from rpc_runtime.transports.shared_memory import host_proof
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH
from rpc_runtime.wire.framing import FrameKind, control_frame, decode, parsed
from tests.helpers.rpc_runtime.joined_links import Answering, Calling, Receiver, Sender, link_threads, send_all
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.rpc_runtime.raw_calls import RawCaller, hello, silence
from tests.helpers.waiting import PATIENCE_SECONDS, eventually


def test_a_caller_that_chooses_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_answer, "CHOICE_SECONDS", 0.2)
    receiver, greeting = Receiver([one_route(8)]), ((HELLO_KEY, hello("0" * 32, "a", "b")),)
    with closing(Answering(receiver.link)) as answering, RawCaller(answering.endpoint) as caller:
        call = caller.begin(LINK_PATH, silence(), None, greeting)
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert "has not chosen a transport" in str(answering.ends[0])
        call.cancel()


def test_what_cannot_be_shared_goes_over_grpc_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, as their boot ids say; where sharing is demanded that is an error."""
    route = one_route(8)
    monkeypatch.setattr(link_answer, "host_proof", lambda deployment: b"another host")
    sender, receiver = Sender([route]), Receiver([route])
    with (
        closing(Answering(receiver.link)) as answering,
        closing(Calling(answering.endpoint, sender.link, Transport.AUTO)) as calling,
    ):
        assert calling.call.statistics.transport == Transport.GRPC
        assert "different hosts" in calling.call.statistics.reason
        send_all(sender, [route], 3)
        assert receiver.wait(3)
    sender, receiver = Sender([route]), Receiver([route])
    with closing(Answering(receiver.link)) as answering:
        with pytest.raises(WorkerError, match="different hosts"):
            Calling(answering.endpoint, sender.link, Transport.SHARED_MEMORY)
        assert not answering.ended.wait(0.5)  # nothing has failed there


@pytest.mark.parametrize("caller_sends", [True, False], ids=["caller sends", "caller receives"])
def test_memory_that_cannot_be_made_leaves_the_link_to_grpc(caller_sends: bool) -> None:
    """As where a process may have no large files, which the kernel counts memory among."""
    route = one_route(100_000)
    sender, receiver = Sender([route]), Receiver([route])
    called, answered = (sender.link, receiver.link) if caller_sends else (receiver.link, sender.link)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            closing(Answering(answered)) as answering,
            closing(Calling(answering.endpoint, called, Transport.AUTO)) as calling,
        ):
            assert calling.call.statistics.transport == Transport.GRPC
            assert re.search("'?b'? cannot make it: .*File too large", calling.call.statistics.reason)
            send_all(sender, [route], 3)
            assert receiver.wait(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_secret_that_comes_too_late_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_answer, "CHOICE_SECONDS", 2.0)
    receiver = Receiver([one_route(8)])
    greeting = pb.Hello(deployment="0" * 32, source="a", destination="b", host=host_proof("0" * 32))
    choice = control_frame(FrameKind.CHOICE, pb.Choice(shared_memory=True).SerializeToString())
    with closing(Answering(receiver.link)) as answering, RawCaller(answering.endpoint) as caller:
        call = caller.begin(LINK_PATH, [choice], 20, ((HELLO_KEY, greeting.SerializeToString()),))
        accept = parsed(pb.Accept, decode(next(call)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"\0{accept.socket}")
            assert answering.ended.wait(PATIENCE_SECONDS)
            connection.settimeout(PATIENCE_SECONDS)
            connection.send(accept.secret)
            while connection.recv(100):  # the memory, and then its end
                pass
        call.cancel()
    eventually(lambda: not link_threads(), "no thread of a link is left")


def test_a_caller_is_told_what_it_did_wrong_first() -> None:
    """What MPI carries may come before the choice of MPI, which comes over gRPC and then is wrong, too."""
    answer = LinkAnswer(Receiver([one_route(8)]).link, pb.Hello(), "the caller", lambda error: None)
    for wrong in ("another number", "a second choice"):
        answer._ended(ProtocolError(wrong))
    with pytest.raises(ProtocolError, match="another number"):
        list(answer.frames(iter(())))
