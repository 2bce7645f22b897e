"""The gRPC transport: carries a link over the call that opened it."""

from rpc_runtime.transports.carrier import Carrier, Pending
from rpc_runtime.transports.transport import Opening, Transport


class Grpc(Transport):
    """The transport that connects any two ends of a link, over the gRPC call that opened it."""

    name = "grpc"
    title = "gRPC"
    rank = 0

    def offer(self, opening: Opening) -> bytes:
        return b""

    def answer(self, opening: Opening, offer: bytes) -> tuple[bytes, Pending]:
        return b"", opening.stream

    def connect(self, opening: Opening, answer: bytes) -> Carrier:
        return opening.stream
