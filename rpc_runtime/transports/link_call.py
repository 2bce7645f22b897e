"""The calling end of a data stream: a gRPC call of its own connection, and a thread that reads what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc

from rpc_runtime.errors import (
    DeadlineError,
    ProtocolError,
    TvmSplitError,
    WorkerError,
    WorkerUnavailableError,
)
from rpc_runtime.program.link_setting import Transport
from rpc_runtime.program.measurements import LinkStatistics
from rpc_runtime.transports import shared_memory
from rpc_runtime.transports.link_end import LinkEnd
from rpc_runtime.transports.link_memory import own_memory
from rpc_runtime.transports.mpi import MpiStream, World
from rpc_runtime.transports.nccl import NcclTransfers, nccl_transfers
from rpc_runtime.transports.nccl_device import Nccl, nccl_of
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH, WorkerEndpoint, error_of, explained, open_channel
from rpc_runtime.wire.framing import Frame, FrameKind, control_frame, decode, error_text, parsed
from rpc_runtime.wire.security import Token

STREAMED = frozenset([Transport.GRPC, Transport.NCCL])
"""By these, what an end says goes over the stream that was opened."""
LAST_WORD_SECONDS = 1.0
"""So long may the reason take by which the other end has closed its memory."""


class LinkCall:
    """Opens the stream that ``hello`` is about to the worker at ``endpoint``, for this side's end of the link.

    A client is let in by the worker's ``token``, another worker by the secret in its ``hello``.
    ``on_broken(machine, error)`` is called once, if the stream ends before ``close``. ``world`` is this process's,
    where it is a rank of one.

    Raises:
        WorkerError: MPI is to carry the link, and there is no ``world``; or NCCL, and this process has none, or no GPU.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        token: Token | None,
        hello: pb.Hello,
        link: LinkEnd,
        on_broken: Callable[[str, TvmSplitError], None],
        world: World | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._link = link
        self._on_broken = on_broken
        self._answered = threading.Event()
        self._chosen = threading.Event()
        self._over = threading.Event()
        self._telling = threading.Lock()
        self._world = world
        self._carrier: shared_memory.SharedMemoryCarrier | MpiStream | None = None
        self._own_nccl: Nccl | None = None
        self._nccl: NcclTransfers | None = None
        self.transport = Transport.GRPC
        """What carries the link, once it is accepted."""
        self._accepted = False
        self._closing = False
        self._error: TvmSplitError | None = None
        self._ends = (hello.source, hello.destination)
        self._reason = "the link's transport is grpc"
        self._refusal = ""
        if endpoint.transport is Transport.MPI:
            if world is None:
                raise WorkerError(
                    f"machine {hello.source!r} is to send to machine {endpoint.machine!r} over MPI, and the worker of "
                    f"{hello.source!r} is in no MPI world: start both by one mpiexec, with --mpi"
                )
            hello.mpi.CopyFrom(world.me)
        elif endpoint.transport is Transport.NCCL:
            try:
                self._own_nccl = nccl_of(link.nccl)
            except WorkerError as error:
                raise WorkerError(
                    f"machine {hello.source!r} is to send to machine {endpoint.machine!r} by NCCL, and the worker of "
                    f"{hello.source!r} cannot: {error}"
                ) from error
            hello.nccl.CopyFrom(pb.NcclEnd(version=self._own_nccl.version, gpu=self._own_nccl.gpu))
        elif endpoint.transport is not Transport.GRPC:
            hello.host = shared_memory.host_proof(hello.deployment)
        self._channel = open_channel(endpoint.address, endpoint.tls)
        metadata = ((HELLO_KEY, hello.SerializeToString()), *(token.metadata if token else ()))
        method = self._channel.stream_stream(LINK_PATH, request_serializer=None, response_deserializer=None)
        self._call = method(self._send(), metadata=metadata)
        self._name = f"link-{hello.source}-{hello.destination}"
        self._thread = threading.Thread(target=self._read, name=self._name, daemon=True)
        self._thread.start()

    def wait_accepted(self, timeout_seconds: float) -> None:
        """Returns when the worker has accepted the stream.

        Raises:
            TvmSplitError: it has refused, cannot be reached, or said nothing in time.
        """
        if not self._answered.wait(timeout_seconds):
            raise DeadlineError(f"{self._endpoint} did not accept a data stream within {timeout_seconds:g} seconds")
        if self._error is not None:
            raise self._error

    @property
    def statistics(self) -> LinkStatistics:
        """What carries the link, once it is accepted."""
        return LinkStatistics(*self._ends, self.transport, self._reason)

    def close(self) -> None:
        self._closing = True
        self._end()
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self._carrier is not None:
            self._carrier.close()

    def _end(self) -> None:
        self._call.cancel()
        self._over.set()
        self._chosen.set()

    def _send(self) -> Iterator[bytes]:
        self._chosen.wait()
        if self._over.is_set():
            return
        choice = pb.Choice(
            shared_memory=self.transport is Transport.SHARED_MEMORY,
            mpi=self.transport is Transport.MPI,
            nccl=self.transport is Transport.NCCL,
            refusal=self._refusal,
        )
        yield control_frame(FrameKind.CHOICE, choice.SerializeToString())
        if self._refusal:
            return
        try:
            if self.transport in STREAMED:
                yield from self._link.frames()
            else:
                self._over.wait()
        except WorkerUnavailableError as error:
            self._error = WorkerUnavailableError(f"{self._endpoint}: {error}")
            raise
        except Exception as error:  # gRPC would only say that the iterator raised
            self._error = WorkerError(f"sending to {self._endpoint} failed: {error!r}")
            raise

    def _read(self) -> None:
        error: TvmSplitError
        try:
            for message in self._call:
                self._take(decode(message))
            error = WorkerUnavailableError(f"{self._endpoint} ended a data stream")
        except grpc.RpcError as status:
            error = error_of(status, str(self._endpoint))
            if isinstance(error, WorkerUnavailableError) and not (self._accepted or self._closing):
                error = explained(error, self._endpoint)
        except TvmSplitError as wrong:
            error = type(wrong)(f"{self._endpoint}: {wrong}")
        except Exception as unexpected:
            error = WorkerError(f"{self._endpoint}: {unexpected!r}")
        self._broken(error)
        if self._nccl is not None:
            self._nccl.close()

    def _broken(self, error: TvmSplitError) -> None:
        with self._telling:
            told, self._error = self._over.is_set(), self._error or error
            self._end()
            self._answered.set()
        if self._accepted and not self._closing and not told:
            self._on_broken(self._endpoint.machine, self._error)

    def _carrier_ended(self, error: TvmSplitError | None) -> None:
        if error is None:
            self._over.wait(LAST_WORD_SECONDS)  # the stream says why, or ends for another reason
            error = WorkerUnavailableError("its end of the shared memory was closed")
        self._broken(type(error)(f"{self._endpoint}: {error}"))

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.ERROR:
            raise ProtocolError(error_text(frame))
        if self._accepted:
            if self.transport not in STREAMED:
                raise ProtocolError(f"a frame of kind {frame.kind.name} came beside what carries the link")
            (self._nccl or self._link).receive(frame)
        elif frame.kind is FrameKind.ACCEPT:
            try:
                if not self._choose(parsed(pb.Accept, frame)):
                    return  # the stream says why, which is read next
            except WorkerError as error:
                if self._chosen.is_set():
                    raise
                self._refuse(str(error))
                return
            self._accepted = True
            self._answered.set()
        else:
            raise ProtocolError(f"a data stream begins with ACCEPT, not with {frame.kind.name}")

    def _refuse(self, why: str) -> None:
        """Says so to the other end, which then ends the stream, and does not take that for a failure."""
        self._error = WorkerError(f"{self._endpoint}: {why}")
        self._refusal = why
        self._chosen.set()

    def _choose(self, accept: pb.Accept) -> bool:
        """Whether there was still somebody to join."""
        connection = memory = None
        if self._endpoint.transport is not Transport.GRPC:
            self._reason = accept.reason
        if self._endpoint.transport is Transport.MPI:
            self._choose_mpi(accept)
            return True
        if self._own_nccl is not None:
            return self._choose_nccl(accept, self._own_nccl)
        if accept.socket:
            try:
                memory = own_memory(self._link)
                connection = shared_memory.call(accept.socket, accept.secret)
            except WorkerError as error:
                self._reason = str(error)
            except OSError as error:
                self._reason = f"{self._ends[1]!r} cannot make it: {error}"
        if connection is None and self._endpoint.transport is Transport.SHARED_MEMORY:
            raise WorkerError(f"no memory can be shared with this worker: {self._reason}")
        if connection is not None:
            self.transport, self._reason = Transport.SHARED_MEMORY, ""
        self._chosen.set()
        if connection is not None:
            carrier = shared_memory.SharedMemoryCarrier
            self._carrier = carrier(connection, memory, self._link, self._carrier_ended, self._name)
        return True

    def _choose_mpi(self, accept: pb.Accept) -> None:
        if self._world is None or not accept.HasField("mpi"):
            raise ProtocolError("a worker that was asked for MPI offers something else")
        self._world.require(accept.mpi)
        rank, number = accept.mpi.rank, accept.number
        self._carrier = MpiStream(self._world, rank, number, self._link, self._carrier_ended, self._name, calls=True)
        self.transport = Transport.MPI
        self._carrier.start()
        self._chosen.set()

    def _choose_nccl(self, accept: pb.Accept, own: Nccl) -> bool:
        if not accept.HasField("nccl"):
            raise ProtocolError("a worker that was asked for NCCL offers something else")
        self._nccl = nccl_transfers(self._link, own, accept.nccl, self._broken, calls=True)
        if not self._nccl.join(lambda: bool(self._call.is_active())):
            return False
        self._nccl.begin()
        self.transport = Transport.NCCL
        self._chosen.set()
        return True
