"""Opens links: the caller and the called end choose a transport over a gRPC call, and each starts its carrier."""

import threading
from collections.abc import Callable, Iterator

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
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame, decode, error_frame, error_text, parsed
from rpc_runtime.wire.security import Token

LAST_WORD_SECONDS = 1.0
"""Time to wait for the reason why the other end has closed its carrier."""
JOIN_SECONDS = 5.0
MAXIMUM_OFFERS = 32
"""Limit of the transports in a greeting: each unknown name makes the worker look through its installed packages."""


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
        self._answered = threading.Event()
        self._chosen = threading.Event()
        self._telling = threading.Lock()
        self._choice = pb.Choice()
        self._stream = Stream(link, lambda: bool(self._call.is_active()))
        self._opening = Opening(link, hello.deployment, endpoint.machine, self._stream)
        self._carrier: Carrier = self._stream
        self._accepted = False
        self._over = False
        self._error: TvmSplitError | None = None
        self._hello = hello
        self._reasons: list[str] = []
        self._offer()
        self._channel = open_channel(endpoint.address, endpoint.tls)
        metadata = ((HELLO_KEY, hello.SerializeToString()), *(token.metadata if token else ()))
        method = self._channel.stream_stream(LINK_PATH, request_serializer=None, response_deserializer=None)
        self._call = method(self._say(), metadata=metadata)
        name = f"link-{hello.source}-{hello.destination}"
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def wait_accepted(self, timeout_seconds: float) -> None:
        """Wait until the link is open.

        Raises:
            TvmSplitError: the worker has refused the link, cannot be reached, or did not answer in time.
        """
        if not self._answered.wait(timeout_seconds):
            raise DeadlineError(f"{self._endpoint} did not accept a data stream within {timeout_seconds:g} seconds")
        if self._error is not None:
            raise self._error

    @property
    def statistics(self) -> LinkStatistics:
        """The transport that carries the open link, and why better ones were not used."""
        ends = (self._hello.source, self._hello.destination)
        return LinkStatistics(*ends, self._choice.transport, "; ".join(self._reasons))

    def close(self) -> None:
        """End the link. Idempotent."""
        self._end()
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        self._carrier.close()

    def _offer(self) -> None:
        hello = self._hello
        for name in offered(self._endpoint.transport):
            try:
                with TRANSPORTS.blamed(name, WorkerError):
                    hello.offers.append(pb.Offer(transport=name, offer=transport_named(name).offer(self._opening)))
            except (WorkerError, PluginError) as error:
                self._reasons.append(str(error))
        self._offered = [offer.transport for offer in hello.offers]
        if not self._offered:
            raise WorkerError(
                f"the link from {hello.source!r} to {hello.destination!r} cannot be opened by "
                f"{self._endpoint.transport}: {'; '.join(self._reasons)}"
            )

    def _end(self) -> None:
        self._over = True
        self._call.cancel()
        self._stream.close()
        self._chosen.set()

    def _say(self) -> Iterator[bytes]:
        self._chosen.wait()
        if self._over:
            return
        yield control_frame(FrameKind.CHOICE, self._choice.SerializeToString())
        if not self._choice.transport:
            return
        try:
            yield from self._stream.frames()
        except WorkerUnavailableError as error:
            self._broken(WorkerUnavailableError(f"{self._endpoint}: {error}"))
        except Exception as error:  # gRPC itself reports only that the iterator raised
            self._error = WorkerError(f"sending to {self._endpoint} failed: {error!r}")
            raise

    def _read(self) -> None:
        error: TvmSplitError
        try:
            for message in self._call:
                self._take(decode(message))
            error = WorkerUnavailableError(f"{self._endpoint} ended a data stream")
        except grpc.RpcError as status:
            error = error_of(status, self._endpoint)
            if isinstance(error, WorkerUnavailableError) and not (self._accepted or self._over):
                error = explained(error, self._endpoint)
        except TvmSplitError as wrong:
            error = type(wrong)(f"{self._endpoint}: {wrong}")
        except Exception as unexpected:
            error = WorkerError(f"{self._endpoint}: {unexpected!r}")
        self._broken(error)
        self._carrier.close()

    def _broken(self, error: TvmSplitError) -> None:
        with self._telling:
            was_over, self._error = self._over, self._error or error
            self._end()
            self._answered.set()
        if self._accepted and not was_over:
            self._on_broken(self._endpoint.machine, self._error)

    def _carrier_ended(self, error: TvmSplitError | None) -> None:
        if error is None:
            self._stream.wait_closed(LAST_WORD_SECONDS)  # the stream may report the reason
            error = WorkerUnavailableError("its end of the link was closed")
        self._broken(type(error)(f"{self._endpoint}: {error}"))

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.ERROR:
            raise ProtocolError(error_text(frame))
        if self._accepted:
            self._stream.receive(frame)
        elif frame.kind is FrameKind.ACCEPT:
            self._choose(parsed(pb.Accept, frame))
        else:
            raise ProtocolError(f"a data stream begins with ACCEPT, not with {frame.kind.name}")

    def _choose(self, accept: pb.Accept) -> None:
        self._reasons += [refused.reason for refused in accept.refused]
        name, carrier = accept.answer.transport, None
        if name:
            if name not in self._offered:
                raise ProtocolError(f"a worker that was offered {', '.join(self._offered)} answers with {name!r}")
            try:
                with TRANSPORTS.blamed(name, WorkerError, ProtocolError):
                    carrier = transport_named(name).connect(self._opening, accept.answer.offer)
                    if not isinstance(carrier, Carrier):
                        raise TypeError(f"connect returned {carrier!r}, which is no Carrier")
            except (WorkerError, PluginError) as error:
                if not self._call.is_active():
                    return  # the stream reports the reason, which is read next
                self._reasons.append(str(error))
                name, carrier = (FALLBACK, self._stream) if FALLBACK in self._offered else ("", None)
        if carrier is None:  # an empty choice makes the other end close the stream without reporting a failure
            self._error = WorkerError(
                f"{self._endpoint} cannot be joined by {self._endpoint.transport}: {'; '.join(self._reasons)}"
            )
            self._chosen.set()
            return
        if name == self._endpoint.transport == FALLBACK:
            self._reasons.append(f"the link's transport is {name}")
        self._carrier, self._choice.transport = carrier, name
        self._chosen.set()
        carrier.start(self._carrier_ended)
        self._stream.leave()
        self._accepted = True
        self._answered.set()


class LinkAnswer:
    """Answers the call that opens a link from ``peer``.

    ``on_end(error)`` may be called several times; the first error is the cause. It is a `ProtocolError` if the peer
    broke the protocol, a `WorkerUnavailableError` if the link has only ended, and another error if this side failed.
    """

    def __init__(self, link: LinkEnd, hello: pb.Hello, peer: str, on_end: Callable[[Exception], None]) -> None:
        self._link = link
        self._peer = peer
        self._on_end = on_end
        self._chosen = threading.Event()
        self._error: ProtocolError | None = None
        self._stream = Stream(link, lambda: not self._over and not self._refused and not link.closed)
        self._carrier: Carrier | None = None
        self._pending: Pending | None = None
        self._ending = threading.Lock()
        self._over = False
        self._refused = False
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
            if not self._chosen.wait(self._choice_seconds):
                raise ProtocolError(f"the caller has not chosen a transport within {self._choice_seconds:g} seconds")
            if self._refused:
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
            if not self._refused:
                self._on_end(WorkerUnavailableError("the data stream was closed"))
            with self._ending:
                self._over = True
            for part in (self._carrier, self._pending, self._stream):
                if part is not None:
                    part.close()
        if self._error is not None:
            yield error_frame(str(self._error))
            raise self._error

    def _answer(self) -> None:
        """Prepare the first possible transport; accept it, with the reasons against the ones before it."""
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
            for frame in map(decode, requests):
                if self._chosen.is_set():
                    self._stream.receive(frame)
                    continue
                self._choose(frame)
                if self._refused:
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
            self._refused = True
            self._chosen.set()
            return
        carrier = self._chosen_pending(name).accept()
        with self._ending:
            self._carrier, is_late = carrier, self._over
        if is_late:  # `frames` has ended and will not close this carrier
            carrier.close()
            return
        carrier.start(self._ended)
        self._chosen.set()

    def _chosen_pending(self, name: str) -> Pending:
        if self._pending is not None and name == self._accept.answer.transport:
            return self._pending
        if name == FALLBACK and name in [offer.transport for offer in self._hello.offers]:
            if self._pending is not None:
                self._pending.close()
            return self._stream
        raise ProtocolError(f"the caller chose the transport {name!r}, which it was not offered")

    def _ended(self, error: Exception | None) -> None:
        if self._error is None and isinstance(error, ProtocolError):
            self._error = error  # later errors, by another way, are consequences
        self._on_end(error or WorkerUnavailableError(f"{self._peer!r} ended its data stream"))
        self._link.close()
        self._chosen.set()
