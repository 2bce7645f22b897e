"""One machine, and the link between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpc_runtime.client import WorkerEndpoint
from rpc_runtime.program import CLIENT
from tvm_split.errors import ClusterError


@dataclass(frozen=True)
class Machine:
    """One machine.

    ``target`` is a TVM target as a dictionary (``{"kind": "llvm", "mcpu": "znver4"}``), or None for the machine's own:
    what the worker on it says it is. ``memory_bytes`` limits what weights may take; None is no limit.
    ``endpoint`` is where its worker listens, None as long as no worker runs.
    """

    name: str
    threads: int = 1
    target: Mapping[str, Any] | None = None
    memory_bytes: int | None = None
    endpoint: WorkerEndpoint | None = None

    def __post_init__(self) -> None:
        if not self.name or self.name == CLIENT:
            raise ClusterError(f"a machine cannot be named {self.name!r}")
        if self.threads < 1:
            raise ClusterError(f"machine {self.name!r} has {self.threads} threads; give at least 1")


@dataclass(frozen=True)
class Link:
    """A one-way link: tensors of ``b`` bytes take ``latency_seconds + b / bytes_per_second``."""

    source: str
    destination: str
    bytes_per_second: float
    latency_seconds: float = 0.0
