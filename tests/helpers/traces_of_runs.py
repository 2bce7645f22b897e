"""Traces of two machines and a client, with times chosen by hand."""

from rpc_runtime.program.events import BLOCK, COMPUTE, FLIGHT, RECEIVE, SEND, WAIT, WINDOW, Recorder
from rpc_runtime.program.routes import CLIENT
from tvm_split.observing.trace import Trace, trace_of

A, B = "machine-a", "machine-b"
MILLISECOND = 1_000_000
COUNT = 20


def two_machines(computing: tuple[int, int] = (6, 9), wire: int = 1) -> Trace:
    """A stream with a result every 10 ms: both machines compute for so many milliseconds, a transfer takes ``wire``."""
    recorders = {name: Recorder() for name in (A, B, CLIENT)}

    def record(
        machine: str, kind: str, begin: int, end: int, stage: str = "", peer: str = "", tensor: str = ""
    ) -> None:
        track = recorders[machine].track(kind, stage, peer, tensor)
        size_bytes = 1000 if kind in (SEND, RECEIVE) else 0
        recorders[machine].record(track, sequence, begin * MILLISECOND, end * MILLISECOND, size_bytes, value=1)

    for sequence in range(COUNT):
        start = 100 + 10 * sequence
        record(CLIENT, SEND, start - wire, start, peer=A, tensor="x")
        record(A, RECEIVE, start - wire, start, "first", CLIENT, "x")
        record(A, COMPUTE, start, start + computing[0], "first")
        middle = start + computing[0]
        record(A, BLOCK, middle, start + 10, "first", B)
        record(A, SEND, middle, middle + wire, "first", B, "y")
        record(B, RECEIVE, middle, middle + wire, "second", A, "y")
        record(B, WINDOW, middle + wire, middle + wire, "second", A, "y")
        begin = middle + wire
        record(B, COMPUTE, begin, begin + computing[1], "second")
        record(B, WAIT, begin + computing[1], begin + 10, "second", A)
        record(B, SEND, begin + computing[1], begin + computing[1] + wire, "second", CLIENT, "z")
        record(CLIENT, RECEIVE, begin + computing[1], begin + computing[1] + wire, peer=B, tensor="z")
        record(CLIENT, FLIGHT, start - wire, begin + computing[1] + wire)
    return trace_of("net", {name: recorder.observe(since=0) for name, recorder in recorders.items()}, {})
