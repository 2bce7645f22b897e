"""What may carry a link. Which one does is agreed when it is opened: `link_call`, `link_answer`."""

from __future__ import annotations

import enum


class Transport(enum.StrEnum):
    """``AUTO``: shared memory between processes of one host and user, gRPC otherwise."""

    AUTO = "auto"
    GRPC = "grpc"
    SHARED_MEMORY = "shm"
