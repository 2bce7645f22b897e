"""Transports are offered, answered and chosen within the time limits; failures on the way are reported."""

import socket
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rpc_runtime.errors import TvmSplitError, WorkerError
from rpc_runtime.registry import PluginWarning
from rpc_runtime.transports.liveness import LinkTimeouts
from rpc_runtime.transports.shared_memory import SECRET_BYTES, host_proof
from rpc_runtime.transports.transport import DEFAULT, LinkSetting, ranked, transport_named
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH
from rpc_runtime.wire.framing import FrameKind, control_frame, decode, parsed
from tests.helpers.full_disk import full_disk
from tests.helpers.rpc_runtime.joined_links import (
    DEPLOYMENT,
    Answering,
    Calling,
    Receiver,
    Sender,
    link_threads,
    send_all,
)
from tests.helpers.rpc_runtime.link_peer import one_route
from tests.helpers.rpc_runtime.raw_calls import RawCaller, silence
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

GRPC = pb.Offer(transport="grpc")


@pytest.mark.parametrize(
    ("setting", "domains", "expected"),
    [
        (DEFAULT, ("one", "one"), "shm"),
        (DEFAULT, ("one", "other"), "grpc"),
        (DEFAULT, ("", ""), "grpc"),
        (LinkSetting(address="10.0.0.2:7001"), ("one", "one"), "grpc"),
        (LinkSetting(transport="grpc"), ("one", "one"), "grpc"),
        (LinkSetting(transport="mpi"), ("one", "other"), "mpi"),
        (LinkSetting(transport="nccl"), ("one", "one"), "nccl"),
    ],
)
def test_what_will_carry_a_link(setting: LinkSetting, domains: tuple[str, str], expected: str) -> None:
    assert setting.expected(*domains) == expected


def greeting(*offers: pb.Offer) -> tuple[tuple[str, bytes], ...]:
    hello = pb.Hello(deployment=DEPLOYMENT, source="a", destination="b", offers=offers)
    return ((HELLO_KEY, hello.SerializeToString()),)


def choice(transport: str) -> bytes:
    return control_frame(FrameKind.CHOICE, pb.Choice(transport=transport).SerializeToString())


def test_a_caller_that_chooses_nothing_is_not_waited_for() -> None:
    receiver = Receiver([one_route(8)], LinkTimeouts(choice_seconds=0.2))
    with closing(Answering(receiver.link)) as answering, RawCaller(answering.endpoint) as caller:
        call = caller.begin(LINK_PATH, silence(), None, greeting(GRPC))
        assert answering.ended.wait(PATIENCE_SECONDS)
        assert "has not chosen a transport" in str(answering.ends[0])
        call.cancel()


@pytest.mark.parametrize(
    ("offers", "answer", "reasons"),
    [
        ([GRPC], "grpc", []),
        ([pb.Offer(transport="shm", offer=b"another host"), GRPC], "grpc", ["different hosts"]),
        ([pb.Offer(transport="shm"), GRPC], "grpc", ["different hosts"]),
        ([pb.Offer(transport="unknown"), GRPC], "grpc", ["there is no transport 'unknown'"]),
        ([pb.Offer(transport="mpi", offer=bytes(20))], "", ["not in an MPI world"]),
        ([pb.Offer(transport="nccl", offer=bytes(132))], "", ["its stages are on no GPU"]),
        ([], "", []),
    ],
)
def test_the_first_possible_offer_is_answered(offers: list[pb.Offer], answer: str, reasons: list[str]) -> None:
    receiver = Receiver([one_route(8)])
    with closing(Answering(receiver.link)) as answering, RawCaller(answering.endpoint) as caller:
        call = caller.begin(LINK_PATH, silence(), None, greeting(*offers))
        accept = parsed(pb.Accept, decode(next(call)))
        assert accept.answer.transport == answer
        assert len(accept.refused) == len(reasons)
        assert all(reason in refused.reason for reason, refused in zip(reasons, accept.refused, strict=True))
        call.cancel()


@pytest.mark.parametrize("chosen", ["shm", "nccl", "unknown"])
def test_a_caller_cannot_choose_what_it_was_not_offered(chosen: str) -> None:
    receiver = Receiver([one_route(8)])
    with closing(Answering(receiver.link)) as answering, RawCaller(answering.endpoint) as caller:
        caller.code(LINK_PATH, [choice(chosen)], metadata=greeting(GRPC))
        assert f"'{chosen}', which it was not offered" in str(answering.ends[0])


@pytest.mark.parametrize("caller_sends", [True, False], ids=["caller sends", "caller receives"])
def test_memory_that_cannot_be_made_leaves_the_link_to_grpc(caller_sends: bool) -> None:
    """A limit of file sizes includes memory files. Only a link that requires shared memory fails on this call."""
    route = one_route(100_000)
    sender, receiver = Sender([route]), Receiver([route])
    called, answered = (sender.link, receiver.link) if caller_sends else (receiver.link, sender.link)
    with full_disk(1000), closing(Answering(answered)) as answering:
        with pytest.raises(WorkerError, match=r"cannot be joined by shm: .* cannot make it: "):
            Calling(answering.endpoint, called, "shm")
        with closing(Calling(answering.endpoint, called, "auto")) as calling:
            assert calling.call.statistics.transport == "grpc"
            assert "cannot make it: " in calling.call.statistics.reason
            send_all(sender, [route], 3)
            assert receiver.wait(3)


def test_a_secret_that_comes_too_late_leaves_nothing() -> None:
    receiver = Receiver([one_route(8)], LinkTimeouts(choice_seconds=1.5))
    offer = pb.Offer(transport="shm", offer=host_proof(DEPLOYMENT))
    with closing(Answering(receiver.link)) as answering, RawCaller(answering.endpoint) as caller:
        call = caller.begin(LINK_PATH, [choice("shm")], 20, greeting(offer))
        answer = parsed(pb.Accept, decode(next(call))).answer.offer
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(b"\0" + answer[SECRET_BYTES:])
            assert answering.ended.wait(PATIENCE_SECONDS)
            connection.settimeout(PATIENCE_SECONDS)
            connection.send(answer[:SECRET_BYTES])
            while connection.recv(100):
                pass
        call.cancel()
    eventually(lambda: not link_threads(), "no thread of a link is left")


BROKEN = """
from rpc_runtime.errors import InputError
from rpc_runtime.transports.carrier import Carrier
from rpc_runtime.transports.transport import Transport

class Whole(Transport):
    rank = 99
    def offer(self, opening): return b""
    def answer(self, opening, offer): return b"", opening.stream
    def connect(self, opening, answer): return opening.stream

def fails(*arguments): raise InputError("no such card")
def divides(*arguments): 1 / 0

class Wrapped(Carrier):
    def __init__(self, opening): self.stream = opening.stream
    def start(self, on_end): self.stream.start(on_end)
    def close(self): self.stream.close()

Constructor = type("Constructor", (Whole,), {"__init__": fails})
Joins = type("Joins", (Whole,), {"rank": 100, "joins": fails, "answer": lambda *_: None})
Offer = type("Offer", (Whole,), {"offer": fails})
NoBytes = type("NoBytes", (Whole,), {"offer": lambda *_: "text"})
Answer = type("Answer", (Whole,), {"answer": fails})
Connect = type("Connect", (Whole,), {"connect": fails})
NoCarrier = type("NoCarrier", (Whole,), {"connect": lambda *_: None})
Rank = type("Rank", (Whole,), {"rank": "high"})

def unranked(name, **broken):
    kind = type(name, (Wrapped,), broken)
    answers, connects = lambda self, opening, _: (b"", kind(opening)), lambda self, opening, _: kind(opening)
    return type(name, (Whole,), {"rank": None, "answer": answers, "connect": connects})

Start, Accept = unranked("Start", start=divides), unranked("Accept", accept=divides)
Close = unranked("Close", close=divides)
"""
FAILING = {
    "Constructor": "no such card",
    "Offer": "no such card",
    "NoBytes": "TypeError",
    "Answer": "no such card",
    "Connect": "no such card",
    "NoCarrier": "connect returned None",
    "Start": "ZeroDivisionError",
}
"""Classes whose links cannot be opened, with the reason."""


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package ``fast-cards`` whose transports can be imported and fail when they are used."""
    package = tmp_path / "fast_cards-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-cards\nVersion: 1.0\n")
    entries = "".join(f"{name} = fast_cards:{name}\n" for name in (*FAILING, "Joins", "Rank", "Accept", "Close"))
    (package / "entry_points.txt").write_text(f"[tvm_split.transports]\n{entries}")
    (tmp_path / "fast_cards.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    ranked.cache_clear()
    yield
    ranked.cache_clear()
    transport_named.cache_clear()


@pytest.mark.usefixtures("broken_package")
@pytest.mark.parametrize("name", FAILING)
def test_a_broken_package_is_named_where_its_transport_is_requested(name: str) -> None:
    route, remedy = one_route(8), "update the package, or uninstall it"
    with closing(Answering(Receiver([route]).link)) as answering, warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        with pytest.raises(TvmSplitError, match=f"'{name}' of the package 'fast-cards' .*{FAILING[name]}.*; {remedy}"):
            Calling(answering.endpoint, Sender([route]).link, name)


@pytest.mark.usefixtures("broken_package")
def test_a_broken_package_is_named_at_the_called_end_and_when_it_is_closed() -> None:
    route, named = one_route(8), "'{}' of the package 'fast-cards' failed: ZeroDivisionError"
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        with closing(Answering(Receiver([route]).link)) as answering:
            with (
                suppress(TvmSplitError),
                closing(Calling(answering.endpoint, Sender([route]).link, "Accept")) as calling,
            ):
                calling.ended.wait(PATIENCE_SECONDS)
            assert named.format("Accept") in str(answering.ends[0])
        sender, receiver = Sender([route]), Receiver([route])
        with closing(Answering(receiver.link)) as answering, closing(Calling(answering.endpoint, sender.link, "Close")):
            send_all(sender, [route], 3)
            assert receiver.wait(3)
    assert any(named.format("Close") in str(warning.message) for warning in issued)


@pytest.mark.usefixtures("broken_package")
def test_auto_goes_on_without_the_transports_of_a_broken_package() -> None:
    """It warns of each once, although several links are opened."""
    route = one_route(8)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("default")
        assert DEFAULT.expected("one", "one") in ranked()
        for _ in range(2):
            sender, receiver = Sender([route]), Receiver([route])
            with (
                closing(Answering(receiver.link)) as answering,
                closing(Calling(answering.endpoint, sender.link, "auto")) as calling,
            ):
                assert calling.call.statistics.transport in ("shm", "grpc")
                send_all(sender, [route], 3)
                assert receiver.wait(3)
    texts = Counter(str(warning.message) for warning in issued if warning.category is PluginWarning)
    assert set(texts.values()) == {1}
    for name in ("Answer", "Connect", "Constructor", "Joins", "Offer", "Rank"):
        assert any(f"'{name}' of the package 'fast-cards'" in text for text in texts)


def test_a_long_list_of_names_is_refused() -> None:
    """Looking for one unknown transport takes milliseconds, and a greeting has room for thousands."""
    receiver = Receiver([one_route(8)])
    offers = [pb.Offer(transport=f"{number:x}") for number in range(1000)]
    with closing(Answering(receiver.link)) as answering, RawCaller(answering.endpoint) as caller:
        caller.code(LINK_PATH, [choice("grpc")], metadata=greeting(*offers, GRPC))
        assert "offers at most 32 transports, and this one 1001" in str(answering.ends[0])
