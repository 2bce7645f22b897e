"""Calls to a worker as anybody could make them: any bytes for any method, and what the worker's process holds."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from tvm_split.rpc_runtime.wire.channels import WorkerEndpoint, open_channel
from tvm_split.rpc_runtime.wire.security import Metadata, Token

UNDER_WAY = 12


class RawCaller:
    """A connection that says what it is told to. ``methods`` are paths."""

    def __init__(self, endpoint: WorkerEndpoint) -> None:
        self._channel = open_channel(endpoint.address, None)
        self._metadata = Token(endpoint.token).metadata if endpoint.token else ()

    def begin(
        self, method: str, requests: Iterable[bytes], timeout: float | None = None, metadata: Metadata = ()
    ) -> Any:
        """A call under way; iterate over it, or cancel it. A plain request is a stream of one."""
        everything = (*self._metadata, *metadata)
        return self._channel.stream_stream(method)(iter(requests), timeout=timeout, metadata=everything)

    def code(
        self, method: str, requests: Iterable[bytes], timeout: float = 20, metadata: Metadata = ()
    ) -> grpc.StatusCode:
        return self.answer(method, requests, timeout, metadata)[0]

    def answer(
        self, method: str, requests: Iterable[bytes], timeout: float = 20, metadata: Metadata = ()
    ) -> tuple[grpc.StatusCode, str]:
        """How the call ends, and with which words."""
        call = self.begin(method, requests, timeout, metadata)
        with contextlib.suppress(grpc.RpcError):
            deque(call, maxlen=0)
        return call.code(), call.details()

    def codes(self, method: str, each: Sequence[bytes]) -> Counter[str]:
        """How calls with one request each end; many at a time."""
        call = self._channel.unary_unary(method)
        found: Counter[str] = Counter()
        under_way: deque[Any] = deque()
        for request in each:
            if len(under_way) == UNDER_WAY:
                found[under_way.popleft().code().name] += 1
            under_way.append(call.future(request, timeout=20, metadata=self._metadata))
        found.update(future.code().name for future in under_way)
        return found

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> RawCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def silence(seconds: float = 60.0) -> Iterator[bytes]:
    """A caller who says nothing."""
    time.sleep(seconds)
    yield from ()


def memory_bytes(process: int) -> int:
    """What a process holds in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def open_files(process: int) -> int:
    return sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())


def threads(process: int) -> int:
    return sum(1 for _ in Path(f"/proc/{process}/task").iterdir())
