"""The control service's methods: name, whether requests and replies stream, and their messages. Both sides use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_split.rpc_runtime.wire import worker_pb2 as pb
from tvm_split.rpc_runtime.wire.foreign_text import clean_message
from tvm_split.rpc_runtime.wire.framing import CHUNK_BYTES

CONTROL_SERVICE = "tvm_split.Control"
DATA_SERVICE = "tvm_split.Data"
LINK_METHOD = "Link"
LINK_PATH = f"/{DATA_SERVICE}/{LINK_METHOD}"
HELLO_KEY = "tvm-split-hello-bin"
"""The metadata of a Link call that holds its ``Hello``: who calls is known before anything of the stream is read."""


@dataclass(frozen=True)
class Method:
    """``maximum_request_bytes`` is what the method needs: a message that is parsed takes ten times its bytes."""

    name: str
    request: Any
    reply: Any
    streams_requests: bool = False
    streams_replies: bool = False
    maximum_request_bytes: int = 64 << 10

    @property
    def path(self) -> str:
        return f"/{CONTROL_SERVICE}/{self.name}"

    def read_reply(self, content: bytes) -> Any:
        """What a worker answered, its texts fit to be shown."""
        return clean_message(self.reply.FromString(content))


_LONG = 8 << 20
"""Some ten thousand weights, or kernels."""

DESCRIBE = Method("Describe", pb.DescribeRequest, pb.DescribeReply)
WATCH = Method("Watch", pb.WatchRequest, pb.WatchEvent, streams_replies=True)
MISSING_BLOBS = Method("MissingBlobs", pb.MissingBlobsRequest, pb.MissingBlobsReply, maximum_request_bytes=_LONG)
PUT_BLOB = Method(
    "PutBlob", pb.PutBlobRequest, pb.PutBlobReply, streams_requests=True, maximum_request_bytes=2 * CHUNK_BYTES
)
LOAD_STAGES = Method("LoadStages", pb.LoadStagesRequest, pb.LoadStagesReply, maximum_request_bytes=_LONG)
CONNECT = Method("Connect", pb.ConnectRequest, pb.ConnectReply)
UNLOAD = Method("Unload", pb.UnloadRequest, pb.UnloadReply)
STATISTICS = Method("Statistics", pb.StatisticsRequest, pb.StatisticsReply)
TRACE = Method("Trace", pb.TraceRequest, pb.TraceReply)
LOAD_KERNELS = Method("LoadKernels", pb.LoadKernelsRequest, pb.LoadKernelsReply, maximum_request_bytes=_LONG)
TIME_KERNELS = Method("TimeKernels", pb.TimeKernelsRequest, pb.TimeKernelsReply)
METHODS = (
    DESCRIBE,
    WATCH,
    MISSING_BLOBS,
    PUT_BLOB,
    LOAD_STAGES,
    CONNECT,
    UNLOAD,
    STATISTICS,
    TRACE,
    LOAD_KERNELS,
    TIME_KERNELS,
)
