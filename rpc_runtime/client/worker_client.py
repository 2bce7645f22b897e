"""The control connection to one worker: describe it, send blobs and stages, get measurements. Does not need TVM."""

import getpass
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rpc_runtime.client.asking import answers_of, on_every_machine
from rpc_runtime.client.upload import upload
from rpc_runtime.errors import BlobError, DeadlineError, ProtocolError, WorkerUnavailableError
from rpc_runtime.hardware import HostCores, boot_id
from rpc_runtime.program.clocks import ClockSample, MachineClock
from rpc_runtime.program.events import Observation, checked, now
from rpc_runtime.program.measurements import KernelSet, KernelTime, LinkStatistics, TimingEffort
from rpc_runtime.program.program import Program
from rpc_runtime.program.specs import BlobSpec
from rpc_runtime.transports.liveness import USUAL_WATCH
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint, error_of, explained, open_channel
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from rpc_runtime.wire.messages import load_request, message_of, value_of
from rpc_runtime.wire.security import Token, find_token
from rpc_runtime.wire.text import clean_message
from rpc_runtime.wire.worker_pb2_grpc import ControlStub

CLOCK_ROUNDS = 5
LONG_REPLY_BYTES = 64 * 1024
"""After a longer reply, the client requests a short one, whose round trip gives a more exact clock offset."""
SLOWEST_LINK_BYTES_PER_SECOND = 256 * 1024
BLOB_SECONDS = 0.1
"""Blobs may take longer than the caller's timeout: their size divided by `SLOWEST_LINK_BYTES_PER_SECOND`, plus this
time for each blob."""
SLOWEST_LOAD_BYTES_PER_SECOND = 20e6
TRIAL_START_SECONDS = 10.0
"""Additional time to load, because the worker may have to start the process that tries out libraries."""
ANSWER_SECONDS = 5.0
"""Timeout of a worker's first answer: a running worker answers sooner, and a stopped one never."""
SIGN_OF_LIFE_SECONDS = 1.0


@dataclass(frozen=True)
class CudaDeviceDescription:
    """A GPU that a worker can use; ``arch`` is nvcc's name, such as ``sm_90``.

    The other fields are set for the first GPU only (0 or empty: not known): its free memory; ``bus_identity``, which is
    equal for workers that share the GPU; and the bandwidth and latency of transfers from and to host memory.
    """

    index: int
    arch: str
    memory_bytes: int
    memory_free_bytes: int = 0
    bus_identity: str = ""
    bus_bytes_per_second: float = 0.0
    bus_latency_seconds: float = 0.0


@dataclass(frozen=True)
class CudaDescription:
    """CUDA on a machine: the driver's version (13000 is 13.0; 0: no driver), why no GPU is usable, nvcc's version."""

    driver: int
    problem: str
    compiler: str


@dataclass(frozen=True)
class HeldDeployment:
    """A deployment on a worker; ``name`` is the first part of its random name.

    ``model`` and ``owner`` (USER@HOST) are what the client said; both may be empty. ``micro_batches_per_second`` is the
    rate of the busiest stage in the last seconds. ``moves``: the client moves the stages away if the worker drains.
    """

    name: str
    model: str
    owner: str
    weight_bytes: int
    micro_batches_per_second: float
    moves: bool = False


@dataclass(frozen=True)
class WorkerDescription:
    """A worker's machine and its free resources.

    ``cpu_features`` are Linux's names of its instruction sets. ``cores`` is how many cores the worker can keep busy;
    ``host_cores`` says which cores and which quota; ``threads`` is the number of threads per kernel. The worker's
    monotonic clock is ``clock_offset_nanoseconds`` ahead of this process's, and its wall clock
    ``wall_clock_offset_nanoseconds``, both with an error of at most half of ``round_trip_seconds``. ``load`` is the
    load average of the last minute of the host, which has ``host_core_count`` cores. Workers with equal ``boot_id``
    share a host, even if containers give them different hostnames; workers with equal ``memory_domain`` can share
    memory. ``certificate_expires`` is in seconds since 1970. A worker that is ``draining`` takes no new deployments.
    What is not known is empty or 0.
    """

    machine: str
    hostname: str
    architecture: str
    cpu_features: tuple[str, ...]
    cores: int
    core_numbers: tuple[int, ...]
    core_quota: float
    quota_group: str
    threads: int
    memory_total_bytes: int
    memory_free_bytes: int
    tvm_version: str
    tvm_ffi_version: str
    numpy_version: str
    protocol_version: int
    cuda_devices: tuple[CudaDeviceDescription, ...]
    cuda: CudaDescription
    secure: bool
    certificate_expires: int
    deployments: tuple[HeldDeployment, ...]
    process_id: int
    boot_id: str
    memory_domain: str
    package_version: str
    python_version: str
    cache_free_bytes: int
    file_limit: int
    load: float
    host_core_count: int
    round_trip_seconds: float
    clock_offset_nanoseconds: int
    wall_clock_offset_nanoseconds: int
    draining: bool = False

    @property
    def host(self) -> str:
        """Identifier of the host; equal for workers that share its cores and memory."""
        return self.boot_id or self.hostname

    @property
    def host_cores(self) -> HostCores:
        """The cores that the worker may use."""
        return HostCores(self.host, self.core_numbers, self.core_quota, self.quota_group)


def describe(endpoint: WorkerEndpoint, timeout_seconds: float = ANSWER_SECONDS) -> WorkerDescription:
    """Return a worker's description of itself and its machine.

    Raises:
        WorkerUnavailableError: the worker does not answer in time.
        WorkerError: the worker refuses, for example because of the token.
        ProtocolError: the worker uses another protocol version.
    """
    connection = WorkerClient(endpoint)
    try:
        return connection.describe(timeout_seconds)
    finally:
        connection.close()


def describe_all(
    endpoints: Mapping[str, WorkerEndpoint], timeout_seconds: float = ANSWER_SECONDS
) -> dict[str, WorkerDescription]:
    """Return the description of each machine's worker. Raises as `describe`, and names all unreachable machines."""
    return on_every_machine(endpoints, lambda machine: describe(endpoints[machine], timeout_seconds))


def answering(endpoints: Mapping[str, WorkerEndpoint]) -> dict[str, WorkerDescription]:
    """Return the descriptions of the workers that answer within `SIGN_OF_LIFE_SECONDS`, by machine."""
    return answers_of(endpoints, lambda machine: describe(endpoints[machine], SIGN_OF_LIFE_SECONDS))[0]


def not_drained(workers: Mapping[str, WorkerDescription]) -> dict[str, WorkerDescription]:
    """Return the workers that take new deployments."""
    return {machine: worker for machine, worker in workers.items() if not worker.draining}


class WorkerClient:
    """A control connection to one worker. Every call has a deadline, and its errors name the worker.

    ``deployment`` is the random name of the deployment that all calls but `describe` refer to.
    """

    def __init__(self, endpoint: WorkerEndpoint, deployment: str = "") -> None:
        self.endpoint = endpoint
        self.deployment = deployment
        self.token = Token(endpoint.token) if endpoint.token else find_token(endpoint.address)
        self._metadata = self.token.metadata if self.token else None
        self.clock = MachineClock()
        self._shares_clock = False
        self._channel = open_channel(endpoint.address, endpoint.tls)
        self._stub = ControlStub(self._channel)

    def describe(self, timeout_seconds: float) -> WorkerDescription:
        """Return the worker's description; raises as the function `describe`.

        Makes several calls within the timeout; those after the first one only make the clock offset more exact.
        """
        rounds: list[tuple[int, int, int, pb.DescribeReply]] = []
        deadline = time.monotonic() + timeout_seconds
        for _ in range(CLOCK_ROUNDS):
            start = now()
            try:
                reply = self._call(pb.DescribeRequest(), deadline - time.monotonic())
            except DeadlineError as error:
                if rounds:
                    break
                raise WorkerUnavailableError(f"{error}. Is the address right, and its worker running?") from error
            except WorkerUnavailableError as error:
                raise explained(error, self.endpoint) from error
            end, wall = now(), time.time_ns()
            half = (end - start) // 2
            rounds.append((end - start, reply.clock_nanoseconds - start - half, wall - half, reply))
        # The quickest round has the smallest error.
        round_trip, offset, wall, reply = min(rounds, key=lambda exchange: exchange[0])
        self._shares_clock = bool(reply.boot_id) and reply.boot_id == boot_id() and abs(offset) <= round_trip
        if self._shares_clock:
            offset = 0
        else:
            self.clock.add(ClockSample(reply.clock_nanoseconds, offset, -(-round_trip // 2)))
        if reply.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{self.endpoint} speaks protocol version {reply.protocol_version}, this client {PROTOCOL_VERSION}: "
                "install the same version on both"
            )
        for name in ("core_quota", "load"):
            if not (math.isfinite(number := getattr(reply, name)) and number >= 0):
                raise ProtocolError(f"{self.endpoint} says that it has a {name} of {number}")
        return value_of(
            WorkerDescription,
            reply,
            round_trip_seconds=round_trip * 1e-9,
            clock_offset_nanoseconds=offset,
            wall_clock_offset_nanoseconds=reply.wall_clock_nanoseconds - wall if reply.wall_clock_nanoseconds else 0,
        )

    def watch(self, beat_seconds: float = USUAL_WATCH.beat_seconds, **more: Any) -> Any:
        """Open the stream of ``WatchEvent``, one each ``beat_seconds``; the deployment ends when the stream ends.

        ``more`` are fields of ``WatchRequest``: the name that `describe` shows, the JSON that `about` returns.
        """
        request = pb.WatchRequest(deployment=self.deployment, owner=_own_name(), beat_seconds=beat_seconds, **more)
        try:
            return self._stub.Watch(request, metadata=self._metadata)
        except ValueError as error:
            raise self._closed() from error

    def send_blobs(
        self,
        blobs: Iterable[BlobSpec],
        blob_path: Callable[[str], Path],
        timeout_seconds: float,
        on_progress: Callable[[int, int], None],
    ) -> int:
        """Send blobs that the worker lacks; return the bytes sent. Call ``on_progress(bytes sent, total bytes)``."""
        by_sha256 = {blob.sha256: blob for blob in blobs}
        listed = [message_of(pb.Blob, blob) for blob in by_sha256.values()]
        reply = self._call(pb.MissingBlobsRequest(deployment=self.deployment, blobs=listed), timeout_seconds)
        missing = [by_sha256[sha256] for sha256 in reply.sha256 if sha256 in by_sha256]
        total = sum(blob.size_bytes for blob in missing)
        on_progress(0, total)
        if not missing:
            return 0
        files = [(blob, blob_path(blob.sha256)) for blob in missing]
        problems: list[BlobError] = []
        requests = upload(self.deployment, files, lambda sent: on_progress(sent, total), problems)
        timeout = timeout_seconds + total / SLOWEST_LINK_BYTES_PER_SECOND + len(missing) * BLOB_SECONDS
        try:
            self._stub.PutBlob(requests, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as status:
            raise problems[0] if problems else error_of(status, self.endpoint) from None
        except ValueError as error:
            raise self._closed() from error
        if problems:
            raise problems[0]
        return total

    def with_blobs(
        self,
        blobs: Collection[BlobSpec],
        blob_path: Callable[[str], Path],
        timeout_seconds: float,
        load: Callable[[], int],
        on_progress: Callable[[int, int], None] = lambda sent, total: None,
    ) -> tuple[int, int]:
        """Send blobs as `send_blobs`, then ``load``; return the bytes sent and what ``load`` returns.

        Only when it loads does a worker see that its file of a blob has changed. The blob is then sent again.
        """
        sent = self.send_blobs(blobs, blob_path, timeout_seconds, on_progress)
        try:
            return sent, load()
        except BlobError:
            again = self.send_blobs(blobs, blob_path, timeout_seconds, on_progress)
            if not again:
                raise
            return sent + again, load()

    def load(self, program: Program, link_secrets: Mapping[tuple[str, str], bytes], timeout_seconds: float) -> int:
        """Load the worker's stages of a program; return the total bytes of their weights.

        ``link_secrets`` are the secrets of the worker's links, by (source, destination).
        """
        machine = self.endpoint.machine
        blobs = {blob.sha256: blob.size_bytes for stage in program.stages_on(machine) for blob in stage.blobs}
        timeout = timeout_seconds + TRIAL_START_SECONDS + sum(blobs.values()) / SLOWEST_LOAD_BYTES_PER_SECOND
        return int(self._call(load_request(self.deployment, program, machine, link_secrets), timeout).weight_bytes)

    def connect(self, peers: Mapping[str, WorkerEndpoint], timeout_seconds: float) -> tuple[LinkStatistics, ...]:
        """Make the worker open its links to other workers; return the transport of each link."""
        request = pb.ConnectRequest(
            deployment=self.deployment,
            timeout_seconds=timeout_seconds,
            peers=[
                pb.Peer(machine=name, address=peer.address, tls=peer.tls is not None, transport=peer.transport)
                for name, peer in peers.items()
            ],
        )
        reply = self._call(request, timeout_seconds + 1.0)
        return tuple(value_of(LinkStatistics, link) for link in reply.links)

    def unload(self, timeout_seconds: float) -> None:
        """End the deployment, or raise if the worker does not answer within `SIGN_OF_LIFE_SECONDS`.

        A frozen worker ends it when it continues, because the stream of `watch` has ended.
        """
        self._call(pb.DescribeRequest(), min(timeout_seconds, SIGN_OF_LIFE_SECONDS))
        self._call(pb.UnloadRequest(deployment=self.deployment), timeout_seconds)

    def observe(self, timeout_seconds: float, since: int | None = None, kernels: int = 0) -> Observation:
        """Return the totals of the deployment on this worker, and its rows after number ``since`` if it is given.

        From now on the kernels of each stage's next ``kernels`` micro-batches are recorded, unless that is 0.

        Raises:
            TvmSplitError: the worker does not know the deployment, does not answer in time, or its answer is malformed.
        """
        asked = now()
        reply = self._call(pb.ObserveRequest(deployment=self.deployment, since=since, kernels=kernels), timeout_seconds)
        if not self._shares_clock:
            self.clock.add(ClockSample.of_round_trip(asked, now(), reply.clock_nanoseconds))
        try:
            seen = checked(value_of(Observation, reply), since)
        except ProtocolError as error:
            raise ProtocolError(f"{self.endpoint}: {error}") from None
        if len(seen.rows) > LONG_REPLY_BYTES and not self._shares_clock:
            self.observe(timeout_seconds)
        return seen

    def about(self, timeout_seconds: float) -> bytes:
        """Return what the client has said about the deployment; raises as `observe`."""
        return bytes(self._call(pb.ObserveRequest(deployment=self.deployment, about=True), timeout_seconds).about)

    def drain(self, draining: bool, timeout_seconds: float) -> None:
        """Make the worker take no new deployments, and ask the clients of its own to move away; or undo that."""
        self._call(pb.DrainRequest(draining=draining), timeout_seconds)

    def load_kernels(self, kernels: KernelSet, timeout_seconds: float) -> int:
        """Load kernels to time, whose library the worker has; return the bytes allocated for their arguments."""
        timeout = timeout_seconds + TRIAL_START_SECONDS + kernels.weight_bytes / SLOWEST_LOAD_BYTES_PER_SECOND
        reply = self._call(message_of(pb.LoadKernelsRequest, kernels, deployment=self.deployment), timeout)
        return int(reply.allocated_bytes)

    def time_kernels(self, effort: TimingEffort, timeout_seconds: float) -> tuple[KernelTime, ...]:
        """Return the time of each loaded kernel; the answer may take ``effort.limit_seconds + timeout_seconds``."""
        request = message_of(pb.TimeKernelsRequest, effort, deployment=self.deployment)
        reply = self._call(request, effort.limit_seconds + timeout_seconds)
        return tuple(value_of(KernelTime, time) for time in reply.times)

    def close(self) -> None:
        self._channel.close()

    def _closed(self) -> WorkerUnavailableError:
        """Return the error that replaces gRPC's `ValueError` for a channel that another thread has closed."""
        return WorkerUnavailableError(f"the connection to {self.endpoint} was closed")

    def _call(self, request: Any, timeout_seconds: float) -> Any:
        """Call the method of ``worker.proto`` that takes this type of request; return the reply."""
        method = type(request).__name__.removesuffix("Request")
        try:
            reply = getattr(self._stub, method)(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as status:
            raise error_of(status, self.endpoint) from None
        except ValueError as error:
            raise self._closed() from error
        if reply is None:
            raise ProtocolError(f"{self.endpoint} ended a call of {method} without a reply")
        return clean_message(reply)


def _own_name() -> str:
    """Return USER@HOST of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
