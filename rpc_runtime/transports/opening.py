"""Opens links: the caller and the called end choose a transport over a gRPC call, and each starts its carrier.

The messages are drawn in `transport`. Each end has two threads here, and its carrier may have more:

- One of gRPC sends: `LinkCall._frames` and `LinkAnswer.frames` wait for the states below, then yield frames.
- One reads: `_read` makes the steps to CHOSEN, OPEN and REFUSED, and then passes frames to the stream.

========  ====================================================  ====================================================
state     the caller                                            the called end
========  ====================================================  ====================================================
OFFERED   sent Hello, waits for ACCEPT                          sent ACCEPT, waits for CHOICE
CHOSEN    has connected; sends CHOICE, starts its carrier       received CHOICE; its carrier is ready and starts
OPEN      the carrier carries the link                          the carrier carries the link
REFUSED   no transport connects; sends an empty CHOICE          received an empty CHOICE, ends without a failure
OVER      the link was closed, or a thread failed: any thread may enter this state, and none leaves it
========  ====================================================  ====================================================
"""

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator
from itertools import chain

import grpc

from rpc_runtime.errors import DeadlineError, ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.registry import PluginError
from rpc_runtime.transports.carrier import Carrier, Pending
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.stream import Stream
from rpc_runtime.transports.transport import FALLBACK, TRANSPORTS, Opening, offered, transport_named
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH, WorkerEndpoint, error_of, explained, open_channel
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame, error_frame, error_text, frames_of, parsed
from rpc_runtime.wire.security import Token

logger = logging.getLogger(__name__)

LAST_WORD_SECONDS = 1.0
"""Time to wait for the reason why the other end has closed its carrier."""
JOIN_SECONDS = 5.0
MAXIMUM_OFFERS = 32
"""Limit of the transports in a Hello: each unknown name makes the worker look through its installed packages."""

State = enum.Enum("State", "OFFERED CHOSEN OPEN REFUSED OVER")


class Progress:
    """The state of one end of a link, for which its threads wait, and the first error."""

    def __init__(self) -> None:
        self.state = State.OFFERED
        self.error: TvmSplitError | None = None
        self._changed = threading.Condition()

    def enter(self, state: State, error: TvmSplitError | None = None) -> State:
        """Enter a state, unless the link is OVER; return the state before."""
        with self._changed:
            before, self.error = self.state, self.error or error
            if before is not State.OVER:
                self.state = state
                self._changed.notify_all()
        return before

    def wait_for_end_of(self, *states: State, seconds: float | None = None) -> bool:
        """Wait until the state is none of these; return False after a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.state not in states, seconds)


def _close(transport: str, part: Carrier | Pending) -> None:
    """Close what a transport has made; a failure is only logged, with a plug-in's name, because the link has ended."""
    try:
        with contextlib.suppress(PluginError), TRANSPORTS.blamed(transport):
            part.close()
    except Exception:
        logger.warning("closing what the transport %s has made failed", transport, exc_info=True)


class LinkCall:
    """Opens the link described by ``hello`` to the worker at ``endpoint``, with the transport that the endpoint names.

    A client is authenticated by the worker's ``token``, another worker by the secret in its ``hello``.
    ``on_broken(machine, error)`` is called once if the link ends before ``close``.

    Raises:
        WorkerError: this end cannot use the transport.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        token: Token | None,
        hello: pb.Hello,
        link: LinkEnd,
        on_broken: Callable[[str, TvmSplitError], None],
    ) -> None:
        self._endpoint = endpoint
        self._on_broken = on_broken
        self._progress = Progress()
        self._stream = Stream(link, lambda: bool(self._call.is_active()))
        self._opening = Opening(link, hello.deployment, endpoint.machine, self._stream)
        self._transport = ""
        """The name of the transport of the carrier; empty until one is chosen."""
        self._carrier: Carrier = self._stream
        self._hello = hello
        self._reasons: list[str] = []
        self._offer()
        self._channel = open_channel(endpoint.address, endpoint.tls)
        metadata = ((HELLO_KEY, hello.SerializeToString()), *(token.metadata if token else ()))
        method = self._channel.stream_stream(LINK_PATH, request_serializer=None, response_deserializer=None)
        self._call = method(self._frames(), metadata=metadata)
        name = f"link-{hello.source}-{hello.destination}"
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def wait_accepted(self, timeout_seconds: float) -> None:
        """Wait until the link is open.

        Raises:
            TvmSplitError: the worker has refused the link, cannot be reached, or did not answer in time.
        """
        if not self._progress.wait_for_end_of(State.OFFERED, State.CHOSEN, State.REFUSED, seconds=timeout_seconds):
            raise DeadlineError(f"{self._endpoint} did not accept a data stream within {timeout_seconds:g} seconds")
        if self._progress.error is not None:
            raise self._progress.error

    @property
    def statistics(self) -> LinkStatistics:
        """The transport that carries the open link, and why better ones were not used."""
        ends = (self._hello.source, self._hello.destination)
        return LinkStatistics(*ends, self._transport, "; ".join(self._reasons))

    def close(self) -> None:
        """End the link. Idempotent."""
        self._progress.enter(State.OVER, WorkerUnavailableError(f"the link to {self._endpoint} was closed"))
        self._end()
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        _close(self._transport or FALLBACK, self._carrier)

    def _offer(self) -> None:
        hello = self._hello
        for name in offered(self._endpoint.transport):
            try:
                with TRANSPORTS.blamed(name, WorkerError):
                    hello.offers.append(pb.Offer(transport=name, offer=transport_named(name).offer(self._opening)))
            except (WorkerError, PluginError) as error:
                self._reasons.append(str(error))
        if not hello.offers:
            raise WorkerError(
                f"the link from {hello.source!r} to {hello.destination!r} cannot be opened by "
                f"{self._endpoint.transport}: {'; '.join(self._reasons)}"
            )

    def _end(self) -> None:
        self._call.cancel()
        self._stream.close()

    def _frames(self) -> Iterator[bytes]:
        self._progress.wait_for_end_of(State.OFFERED)
        if self._progress.state is State.OVER:
            return
        yield control_frame(FrameKind.CHOICE, pb.Choice(transport=self._transport).SerializeToString())
        if not self._transport:
            return
        try:
            yield from self._stream.frames()
        except WorkerUnavailableError as error:
            self._fail(WorkerUnavailableError(f"{self._endpoint}: {error}"))
        except Exception as error:  # gRPC itself reports only that the iterator raised
            self._fail(WorkerError(f"sending to {self._endpoint} failed: {error!r}"))
            raise

    def _read(self) -> None:
        error: TvmSplitError
        try:
            for message in self._call:
                for frame in frames_of(message):
                    self._take(frame)
            error = WorkerUnavailableError(f"{self._endpoint} ended a data stream")
        except grpc.RpcError as status:
            error = error_of(status, self._endpoint)
            if isinstance(error, WorkerUnavailableError) and self._progress.state not in (State.OPEN, State.OVER):
                error = explained(error, self._endpoint)
        except TvmSplitError as wrong:
            error = type(wrong)(f"{self._endpoint}: {wrong}")
        except Exception as unexpected:
            error = WorkerError(f"{self._endpoint}: {unexpected!r}")
        self._fail(error)
        _close(self._transport or FALLBACK, self._carrier)

    def _fail(self, error: TvmSplitError) -> None:
        before = self._progress.enter(State.OVER, error)
        self._end()
        if before is State.OPEN:
            self._on_broken(self._endpoint.machine, error)

    def _carrier_ended(self, error: TvmSplitError | None) -> None:
        if error is None:
            self._stream.wait_closed(LAST_WORD_SECONDS)  # the stream may report the reason
            error = WorkerUnavailableError("its end of the link was closed")
        self._fail(type(error)(f"{self._endpoint}: {error}"))

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.ERROR:
            raise ProtocolError(error_text(frame))
        if self._progress.state is not State.OFFERED:
            self._stream.receive(frame)
        elif frame.kind is FrameKind.ACCEPT:
            self._choose(parsed(pb.Accept, frame))
        else:
            raise ProtocolError(f"a data stream begins with ACCEPT, not with {frame.kind.name}")

    def _choose(self, accept: pb.Accept) -> None:
        self._reasons += [refused.reason for refused in accept.refused]
        name, carrier = accept.answer.transport, None
        try:
            carrier = self._connected(accept.answer) if name else None
        except (WorkerError, PluginError) as error:
            if not self._call.is_active():
                return  # the stream reports the reason, which is read next
            self._reasons.append(str(error))
            if FALLBACK in [offer.transport for offer in self._hello.offers]:
                name, carrier = FALLBACK, self._stream
        if carrier is None:
            reason = f"cannot be joined by {self._endpoint.transport}: {'; '.join(self._reasons)}"
            self._progress.enter(State.REFUSED, WorkerError(f"{self._endpoint} {reason}"))
            return
        if name == self._endpoint.transport == FALLBACK:
            self._reasons.append(f"the link's transport is {name}")
        self._carrier, self._transport = carrier, name
        self._progress.enter(State.CHOSEN)
        with TRANSPORTS.blamed(name, TvmSplitError):
            carrier.start(self._carrier_ended)
        self._stream.leave()
        self._progress.enter(State.OPEN)

    def _connected(self, answer: pb.Offer) -> Carrier:
        """Return the carrier of the transport that the worker accepts."""
        name, offers = answer.transport, [offer.transport for offer in self._hello.offers]
        if name not in offers:
            raise ProtocolError(f"a worker that was offered {', '.join(offers)} answers with {name!r}")
        with TRANSPORTS.blamed(name, WorkerError, ProtocolError):
            carrier = transport_named(name).connect(self._opening, answer.offer)
            if not isinstance(carrier, Carrier):
                raise TypeError(f"connect returned {carrier!r}, not a Carrier")
        return carrier


class LinkAnswer:
    """Answers the call that opens a link from ``peer``.

    ``on_end(error)`` may be called several times; the first error is the cause. It is a `ProtocolError` if the peer
    broke the protocol, a `WorkerUnavailableError` if the link has only ended, and another error if this side failed.
    """

    def __init__(self, link: LinkEnd, hello: pb.Hello, peer: str, on_end: Callable[[Exception], None]) -> None:
        self._link = link
        self._peer = peer
        self._on_end = on_end
        self._progress = Progress()
        self._stream = Stream(link, lambda: self._progress.state not in (State.REFUSED, State.OVER) and not link.closed)
        self._carrier: Carrier | None = None
        self._pending: Pending | None = None
        self._hello, self._accept = hello, pb.Accept()
        self._choice_seconds = link.timeouts.choice_seconds

    def frames(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the frames to send until the link is closed; a thread reads ``requests`` meanwhile.

        Raises:
            WorkerUnavailableError: nothing was received from the peer for too long.
            ProtocolError: the peer broke the protocol.
        """
        try:
            self._answer()
            yield control_frame(FrameKind.ACCEPT, self._accept.SerializeToString())
            threading.Thread(target=self._read, args=(requests,), name=f"read-{self._peer}", daemon=True).start()
            if not self._progress.wait_for_end_of(State.OFFERED, State.CHOSEN, seconds=self._choice_seconds):
                raise ProtocolError(f"the caller has not chosen a transport within {self._choice_seconds:g} seconds")
            if self._progress.state is State.REFUSED:
                return
            if self._stream.carries:
                yield from self._stream.frames()
            else:
                self._link.wait_closed()
        except WorkerUnavailableError as error:
            self._on_end(WorkerUnavailableError(f"from {self._peer!r} {error}"))
            raise
        except Exception as error:
            self._on_end(error)
            raise
        finally:
            if self._progress.enter(State.OVER) is not State.REFUSED:
                self._on_end(WorkerUnavailableError("the data stream was closed"))
            for part in (self._carrier, self._pending):
                if part is not None:
                    _close(self._accept.answer.transport, part)
            self._stream.close()
        if self._progress.error is not None:
            yield error_frame(str(self._progress.error))
            raise self._progress.error

    def _answer(self) -> None:
        """Accept the first possible offer of the caller, with the reasons against the offers before it."""
        offers = self._hello.offers
        if len(offers) > MAXIMUM_OFFERS:
            raise ProtocolError(f"a caller offers at most {MAXIMUM_OFFERS} transports, and this one {len(offers)}")
        opening = Opening(self._link, self._hello.deployment, self._peer, self._stream)
        for offer in offers:
            try:
                with TRANSPORTS.blamed(offer.transport, WorkerError, ProtocolError):
                    transport = transport_named(offer.transport)
                    answer, self._pending = transport.answer(opening, offer.offer)
                    self._accept.answer.CopyFrom(pb.Offer(transport=offer.transport, offer=answer))
                    self._choice_seconds += transport.connect_seconds
                    return
            except (WorkerError, PluginError) as error:
                self._accept.refused.add(transport=offer.transport, reason=str(error))

    def _read(self, requests: Iterator[bytes]) -> None:
        error: Exception | None = None
        try:
            for frame in chain.from_iterable(map(frames_of, requests)):
                if self._progress.state is State.OFFERED:
                    self._choose(frame)
                else:
                    self._stream.receive(frame)
                if self._progress.state is State.REFUSED:
                    return
        except grpc.RpcError:
            error = WorkerUnavailableError(f"the connection to {self._peer!r} broke")
        except Exception as wrong:
            error = wrong
        self._ended(error)

    def _choose(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.CHOICE:
            raise ProtocolError(f"a caller begins with CHOICE, not with {frame.kind.name}")
        name = parsed(pb.Choice, frame).transport
        if not name:
            self._progress.enter(State.REFUSED)
            return
        pending = self._chosen_pending(name)
        with TRANSPORTS.blamed(name, TvmSplitError):
            carrier = self._carrier = pending.accept()
            if self._progress.enter(State.CHOSEN) is State.OVER:  # `frames` may have ended before it saw this carrier
                carrier.close()
                return
            carrier.start(self._ended)
        self._progress.enter(State.OPEN)

    def _chosen_pending(self, name: str) -> Pending:
        if self._pending is not None and name == self._accept.answer.transport:
            return self._pending
        if name == FALLBACK and name in [offer.transport for offer in self._hello.offers]:
            if self._pending is not None:
                _close(self._accept.answer.transport, self._pending)
            return self._stream
        raise ProtocolError(f"the caller chose the transport {name!r}, which it was not offered")

    def _ended(self, error: Exception | None) -> None:
        # Only its violation of the protocol is reported to the peer; other errors are known there.
        self._progress.enter(State.OVER, error if isinstance(error, ProtocolError) else None)
        self._on_end(error or WorkerUnavailableError(f"{self._peer!r} ended its data stream"))
        self._link.close()
