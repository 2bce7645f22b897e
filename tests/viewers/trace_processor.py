"""Ask a Perfetto trace by SQL, without a network: the trace processor of Perfetto's user interface runs in node."""

import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

SCRIPT = Path(__file__).with_suffix(".js")
PART_BYTES = 1 << 20


class _Node:
    """The transport of the protocol: node's standard streams."""

    def __init__(self, user_interface: Path) -> None:
        command = ["node", str(SCRIPT), str(user_interface)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._arrived = b""

    def send(self, request: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<I", len(request)) + request)
        self.process.stdin.flush()

    def read(self, count: int) -> bytes:
        while len(self._arrived) < count:
            (length,) = struct.unpack("<I", self._exactly(4))
            self._arrived += self._exactly(length)
        part, self._arrived = self._arrived[:count], self._arrived[count:]
        return part

    def _exactly(self, count: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(count)
        if len(data) < count:
            raise ConnectionError("node has ended")
        return data

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class TraceProcessor:
    """A trace that answers SQL. A context manager."""

    def __init__(self, trace: Path, user_interface: Path) -> None:
        self._protos = ProtoFactory(PlatformDelegate())
        self._node = _Node(user_interface)
        self._rpc = TraceProcessorRpc(self._node, self._protos)
        content = trace.read_bytes()
        kinds = self._protos.TraceProcessorRpc
        for start in range(0, len(content), PART_BYTES):
            self._call(kinds.TPM_APPEND_TRACE_DATA, append_trace_data=content[start : start + PART_BYTES])
        self._call(kinds.TPM_FINALIZE_TRACE_DATA)

    def _call(self, method: int, **fields: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add(request=method, **fields)
        assert message.request == method
        self._node.send(stream.SerializeToString())
        self._rpc._read_payload()

    def rows(self, sql: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a query's result."""
        result = self._rpc.execute_query(sql)
        if result.error:
            raise ValueError(result.error)
        for row in QueryResultIterator(result.column_names, result.batch):
            yield dict(row.__dict__)

    def __enter__(self) -> "TraceProcessor":
        return self

    def __exit__(self, *_: object) -> None:
        self._node.close()
