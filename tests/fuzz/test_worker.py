"""For any requests, a worker keeps running, answers promptly, and does not disturb a valid deployment."""

import random
import secrets
from typing import Any

import grpc
import pytest

from rpc_runtime.client.worker_client import WorkerClient
from rpc_runtime.program.measurements import KernelSet
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import HELLO_KEY, LINK_PATH
from rpc_runtime.wire.framing import FrameKind, control_frame
from rpc_runtime.wire.messages import LINK_SECRET_BYTES, load_request, message_of
from tests.helpers.mutations import mutated, random_frame, random_message
from tests.helpers.rpc_runtime.pipelines import send_blobs
from tests.helpers.rpc_runtime.programs import A, B
from tests.helpers.rpc_runtime.raw_calls import METHODS, Method, RawCaller, hello
from tests.helpers.rpc_runtime.timed_kernels import KERNELS
from tests.helpers.trials import Memory, Standing, Trials
from tests.helpers.waiting import PATIENCE_SECONDS

MADE_ERRORS = {
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "DATA_LOSS",
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
}
"""The statuses of the protocol; INTERNAL and UNKNOWN would be unexpected errors."""


def secrets_of(program: Program) -> dict[tuple[str, str], bytes]:
    return dict.fromkeys(program.on(A).links, bytes(LINK_SECRET_BYTES))


class Victim:
    """A deployment for the trials, of the same program as the valid one; it may be loaded or not."""

    def __init__(self, standing: Standing, loaded: bool) -> None:
        self.deployment = secrets.token_hex(16)
        self.connection = WorkerClient(standing.endpoint, self.deployment)
        self._watch = self.connection.watch()
        next(self._watch)
        if loaded:
            program, maker = standing.honest.program, standing.maker
            blobs = [blob for stage in program.stages_on(A) for blob in stage.blobs]
            send_blobs(self.connection, blobs, maker)
            self.connection.load(program, secrets_of(program), PATIENCE_SECONDS)

    def close(self) -> None:
        self._watch.cancel()
        self.connection.close()


def right(method: Method, deployment: str, program: Program) -> Any:
    """Return a valid request."""
    blob = program.stages_on(A)[0].library
    if method is METHODS["LoadStages"]:
        return load_request(deployment, program, A, secrets_of(program))
    if method is METHODS["LoadKernels"]:
        return message_of(pb.LoadKernelsRequest, KernelSet(A, "cpu", blob, KERNELS, 1 << 16), deployment=deployment)
    sent, peer = message_of(pb.Blob, blob), pb.Peer(machine=B, address="127.0.0.1:9")
    fields = {"deployment": deployment, "blob": sent, "blobs": [sent], "chunk": b"abc", "peers": [peer]}
    fields |= {"minimum_rounds": 1, "limit_seconds": 0.2, "timeout_seconds": 0.2}
    known = method.request.DESCRIPTOR.fields_by_name
    return method.request(**{name: value for name, value in fields.items() if name in known})


def wrong(method: Method, deployment: str, program: Program, source: random.Random) -> bytes:
    blob = program.stages[0].library.sha256
    words = (deployment, A, B, CLIENT, blob, *(tensor.name for stage in program.stages for tensor in stage.outputs))
    match source.randrange(3):
        case 0:
            return source.randbytes(source.choice((0, 1, 10, 100, 1000)))
        case 1:
            message = random_message(method.request, source, words)
            for name, value in (("deployment", deployment), ("machine", A)):  # or nobody reads what follows
                if name in method.request.DESCRIPTOR.fields_by_name:
                    setattr(message, name, value)
            return bytes(message.SerializeToString())
        case _:
            return mutated(right(method, deployment, program).SerializeToString(), source)


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_control_messages(standing: Standing, trials: Trials, method: Method) -> None:
    memory, program = Memory(standing.process), standing.honest.program
    with RawCaller(standing.endpoint) as caller:
        victim = Victim(standing, loaded=True)
        for number in trials:
            if number % 50 == 49:
                victim.connection.drain(False, PATIENCE_SECONDS)
                victim.close()
                memory.check()
                victim = Victim(standing, loaded=trials.source.random() < 0.5)
            requests = [wrong(method, victim.deployment, program, trials.source)]
            if method.declared.client_streaming:
                requests += [wrong(method, "", program, trials.source) for _ in range(trials.source.randrange(3))]
            seconds = 0.1 if method is METHODS["Watch"] else 20
            code = caller.code(method.path, requests, seconds)
            trials.found[code.name] += 1
            assert code is grpc.StatusCode.OK or code.name in MADE_ERRORS, (code, requests)
        victim.connection.drain(False, PATIENCE_SECONDS)
        victim.close()


def wrong_greeting(deployment: str, source: random.Random) -> bytes:
    """Return a greeting, in most cases a valid one."""
    begin = hello(deployment, *source.choice(((CLIENT, A), (A, CLIENT), (B, A), (A, B))))
    return begin if source.random() < 0.8 else mutated(begin, source)


def test_data_frames(standing: Standing, trials: Trials) -> None:
    memory, program = Memory(standing.process), standing.honest.program
    with RawCaller(standing.endpoint) as caller:
        for _ in trials:
            victim = Victim(standing, loaded=trials.source.random() < 0.9)
            greeting = wrong_greeting(victim.deployment, trials.source)
            choice = [control_frame(FrameKind.CHOICE)] if trials.source.random() < 0.9 else []
            count = trials.source.choice((0, 1, 3, 20))
            size_bytes = program.inputs[0].size_bytes
            frames = [*choice, *(random_frame(trials.source, number, size_bytes) for number in range(count))]
            code = caller.code(LINK_PATH, frames, 1, metadata=((HELLO_KEY, greeting),))
            trials.found[code.name] += 1
            assert code is grpc.StatusCode.OK or code.name in MADE_ERRORS, (code, greeting, frames)
            victim.close()
            memory.check()
