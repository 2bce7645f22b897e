"""The answering end of a data stream: offers shared memory, MPI or NCCL to whom it may, and reads in its own thread."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator

import grpc

from rpc_runtime.errors import ProtocolError, WorkerError, WorkerUnavailableError
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.mpi import MpiStream, World
from rpc_runtime.transports.nccl import NcclTransfers, nccl_transfers
from rpc_runtime.transports.nccl_device import nccl_of
from rpc_runtime.transports.shared_memory import Offer, SharedMemoryCarrier, host_proof
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame, decode, error_frame, parsed


class LinkAnswer:
    """Answers one stream from ``peer``. ``on_end(error)`` may be called several times; the first is the cause.

    Its error is a `ProtocolError` for what the peer must not say, a `WorkerUnavailableError` where the stream has just
    ended, and anything else where this side has failed. ``world`` is this process's, where it is a rank of one.

    Raises:
        WorkerError: the caller asks for MPI, or NCCL, which does not join it with this process.
    """

    def __init__(
        self,
        link: LinkEnd,
        hello: pb.Hello,
        peer: str,
        on_end: Callable[[Exception], None],
        world: World | None = None,
    ) -> None:
        self._link = link
        self._peer = peer
        self._on_end = on_end
        self._chosen = threading.Event()
        self._error: ProtocolError | None = None
        self._carrier: SharedMemoryCarrier | MpiStream | None = None
        self._offer: Offer | None = None
        self._ending = threading.Lock()
        self._over = False
        self._refused = False
        self._mpi: MpiStream | None = None
        self._nccl: NcclTransfers | None = None
        self._accept = self._offered(hello, world)

    def frames(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """What this end says, until the link is closed; reads ``requests`` meanwhile.

        Raises:
            WorkerUnavailableError: the peer has been silent for too long.
        """
        try:
            yield control_frame(FrameKind.ACCEPT, self._accept.SerializeToString())
            threading.Thread(target=self._read, args=(requests,), name=f"read-{self._peer}", daemon=True).start()
            if self._nccl is not None:
                self._nccl.join(lambda: not self._refused and not self._link.closed)
            seconds = self._link.timeouts.choice_seconds
            if not self._chosen.wait(seconds):
                raise ProtocolError(f"the caller has not chosen a transport within {seconds:g} seconds")
            if self._refused:
                return
            if self._carrier is None:
                yield from self._link.frames()
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
            for each in (self._carrier, self._mpi, self._nccl, self._offer):
                if each is not None:
                    each.close()
        if self._error is not None:
            yield error_frame(str(self._error))
            raise self._error

    def _offered(self, hello: pb.Hello, world: World | None) -> pb.Accept:
        """Makes what the caller may choose, and says where it is, or why there is none."""
        if hello.HasField("mpi"):
            if world is None:
                raise WorkerError("this worker is in no MPI world: start both by one mpiexec, with --mpi")
            world.require(hello.mpi)
            number, name = world.next_number(), f"read-{self._peer}"
            self._mpi = MpiStream(world, hello.mpi.rank, number, self._link, self._ended, name, calls=False)
            return pb.Accept(mpi=world.me, number=number)
        if hello.HasField("nccl"):
            self._nccl = nccl_transfers(self._link, nccl_of(self._link.nccl), hello.nccl, self._ended, calls=False)
            return pb.Accept(nccl=self._nccl.own)
        if not hello.host:
            return pb.Accept(reason="the caller cannot share memory, or does not want to")
        if not hmac.compare_digest(hello.host, host_proof(hello.deployment)):
            return pb.Accept(reason="caller and worker are on different hosts")
        try:
            self._offer = Offer(self._link)
        except OSError as error:
            return pb.Accept(reason=f"{hello.destination!r} cannot make it: {error}")
        return pb.Accept(socket=self._offer.name, secret=self._offer.secret)

    def _read(self, requests: Iterator[bytes]) -> None:
        error: Exception | None = None
        try:
            for frame in map(decode, requests):
                if not self._chosen.is_set():
                    self._choose(frame)
                    if self._refused:
                        return
                    continue
                if self._carrier is not None:
                    raise ProtocolError(f"a frame of kind {frame.kind.name} came beside what carries the link")
                (self._nccl or self._link).receive(frame)
        except grpc.RpcError:
            error = WorkerUnavailableError(f"the connection to {self._peer!r} broke")
        except Exception as wrong:
            error = wrong
        self._ended(error)

    def _choose(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.CHOICE:
            raise ProtocolError(f"a caller begins with CHOICE, not with {frame.kind.name}")
        choice = parsed(pb.Choice, frame)
        if choice.refusal:
            self._refused = True
            self._chosen.set()
            return
        for chosen, offered in ((choice.mpi, self._mpi), (choice.nccl, self._nccl)):
            if chosen != (offered is not None):
                raise ProtocolError("whoever asks for MPI or NCCL chooses it where it is offered, and nobody else")
        if self._mpi is not None:
            self._carrier = self._mpi
            self._mpi.start()
        elif self._nccl is not None:
            self._nccl.begin()
        elif choice.shared_memory:
            if self._offer is None:
                raise ProtocolError("the caller chose shared memory, which it was not offered")
            name = f"read-{self._peer}"
            connection = self._offer.accept()
            carrier = SharedMemoryCarrier(connection, self._offer.memory, self._link, self._ended, name)
            with self._ending:
                self._carrier, is_late = carrier, self._over
            if is_late:  # nobody else would close it
                carrier.close()
        if self._offer is not None:
            self._offer.close()
        self._chosen.set()

    def _ended(self, error: Exception | None) -> None:
        if self._error is None and isinstance(error, ProtocolError):
            self._error = error  # what comes after it, over another way, is no cause
        self._on_end(error or WorkerUnavailableError(f"{self._peer!r} ended its data stream"))
        self._link.close()
        self._chosen.set()
