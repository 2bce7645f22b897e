"""What may carry a link, and how one is to be opened. Which it is then is agreed on by its ends: `link_call`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Transport(enum.StrEnum):
    """``AUTO``: shared memory between processes of one host and user, gRPC otherwise. ``MPI`` is never taken by itself:
    its waiting costs a part of a core; nor are ``CUDA_IPC``, from GPU to GPU of one host, and ``NCCL``, of any two
    hosts, which no GPU has run. Where ``CUDA_IPC`` cannot be had, the link is as by ``AUTO``."""

    AUTO = "auto"
    GRPC = "grpc"
    SHARED_MEMORY = "shm"
    MPI = "mpi"
    CUDA_IPC = "ipc"
    NCCL = "nccl"


IN_MEMORY = frozenset[str]([Transport.SHARED_MEMORY, Transport.CUDA_IPC])
"""By these, tensors lie where both ends see them."""
FROM_GPU_TO_GPU = frozenset[str]([Transport.CUDA_IPC, Transport.NCCL])
"""By these, tensors pass no memory of a host that this project knows of."""
UNCODED = IN_MEMORY | FROM_GPU_TO_GPU
"""By these, no codec writes tensors."""


IPC_BLOCK_BYTES = 2 << 20
"""Memory that lies on a GPU for another process takes whole blocks of this size: of smaller memory all of the block
would be opened (CUDA C++ Programming Guide, Interprocess Communication)."""


@dataclass(frozen=True)
class LinkSetting:
    """``address`` is where the source reaches the destination, if not where the client does. Whoever gives one wants
    the link to pass there, so by itself it then shares no memory."""

    address: str | None = None
    transport: Transport = Transport.AUTO

    @property
    def wanted(self) -> Transport:
        return Transport.GRPC if self.transport is Transport.AUTO and self.address else self.transport

    def expected(self, source_domain: str, destination_domain: str, *, have_gpus: bool = True) -> Transport:
        """What will carry it between ends of these `hardware.memory_domain`; empty ones share no memory."""
        if self.wanted not in (Transport.AUTO, Transport.CUDA_IPC):
            return self.wanted
        if source_domain != destination_domain or not source_domain:
            return Transport.GRPC
        return Transport.CUDA_IPC if self.wanted is Transport.CUDA_IPC and have_gpus else Transport.SHARED_MEMORY


LinkSettings = Mapping[tuple[str, str], LinkSetting]
"""By (source, destination), either of which may be the client; `DEFAULT` where there is none."""
DEFAULT = LinkSetting()
NO_SETTINGS: LinkSettings = MappingProxyType({})
