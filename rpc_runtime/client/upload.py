"""The messages that upload blobs to a worker."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rpc_runtime.errors import BlobError
from rpc_runtime.program.specs import BlobSpec
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.framing import CHUNK_BYTES
from rpc_runtime.wire.messages import message_of


def upload(
    deployment: str,
    files: Sequence[tuple[BlobSpec, Path]],
    on_sent: Callable[[int], None],
    problems: list[BlobError],
) -> Iterator[pb.PutBlobRequest]:
    """Yield the messages that upload several blobs in one call; one call for each small blob would be slow.

    If a file cannot be read, the error is added to ``problems`` and the iteration ends: gRPC itself would report only
    that an iterator raised.
    """
    sent = 0
    for number, (blob, path) in enumerate(files):
        request = pb.PutBlobRequest(deployment="" if number else deployment, blob=message_of(pb.Blob, blob))
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    request.chunk = chunk
                    yield request
                    request = pb.PutBlobRequest()
                    sent += len(chunk)
                    on_sent(sent)
        except OSError as error:
            problems.append(BlobError(f"cannot read blob {blob.sha256[:12]} from {path}: {error}"))
            return
        if request.HasField("blob"):  # an empty blob
            yield request
