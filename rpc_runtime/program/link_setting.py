"""What may carry a link, and how one is to be opened. Which it is then is agreed on by its ends: `link_call`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Transport(enum.StrEnum):
    """``AUTO``: shared memory between processes of one host and user, gRPC otherwise. ``MPI`` is never taken by itself:
    its waiting costs a part of a core; nor is ``NCCL``, from GPU to GPU, which no GPU has run."""

    AUTO = "auto"
    GRPC = "grpc"
    SHARED_MEMORY = "shm"
    MPI = "mpi"
    NCCL = "nccl"


UNCODED = frozenset[str]([Transport.SHARED_MEMORY, Transport.NCCL])
"""By these, no codec writes tensors."""


@dataclass(frozen=True)
class LinkSetting:
    """``address`` is where the source reaches the destination, if not where the client does. Whoever gives one wants
    the link to pass there, so by itself it then shares no memory."""

    address: str | None = None
    transport: Transport = Transport.AUTO

    @property
    def wanted(self) -> Transport:
        return Transport.GRPC if self.transport is Transport.AUTO and self.address else self.transport

    def expected(self, source_domain: str, destination_domain: str) -> Transport:
        """What will carry it between ends of these `hardware.memory_domain`; empty ones share no memory."""
        if self.wanted is not Transport.AUTO:
            return self.wanted
        shares = source_domain and source_domain == destination_domain
        return Transport.SHARED_MEMORY if shares else Transport.GRPC


LinkSettings = Mapping[tuple[str, str], LinkSetting]
"""By (source, destination), either of which may be the client; `DEFAULT` where there is none."""
DEFAULT = LinkSetting()
NO_SETTINGS: LinkSettings = MappingProxyType({})
