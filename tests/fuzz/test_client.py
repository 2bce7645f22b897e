"""For any answers of a worker, its client ends with one of the project's errors."""

import random
import time
from collections.abc import Iterator
from typing import Any

import grpc

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.measurements import KernelSet, TimingEffort
from rpc_runtime.program.program import Program
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import LINK_PATH
from rpc_runtime.wire.framing import PROTOCOL_VERSION, FrameKind, control_frame
from tests.helpers.mutations import mutated, random_frame, random_message
from tests.helpers.rpc_runtime.hostile_worker import Answer, HostileWorker, describes_itself
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, one_stage
from tests.helpers.rpc_runtime.raw_calls import METHODS, Method
from tests.helpers.rpc_runtime.timed_kernels import KERNELS
from tests.helpers.trials import Trials

TIMEOUT_SECONDS = 0.5
ANSWERED = tuple(method for method in METHODS.values() if method is not METHODS["Watch"])


def nonsense(method: Method, source: random.Random) -> Answer:
    """Return a random answer to a method: an error, silence, random bytes, or a message of the right kind."""
    right = random_message(method.reply, source, (A, "one"))
    if method is METHODS["Describe"]:
        right.protocol_version = PROTOCOL_VERSION
    text = right.SerializeToString()
    match source.randrange(6):
        case 0:
            replies = [source.randbytes(source.choice((1, 10, 1000)))]
        case 1:
            replies = [mutated(text, source)]
        case 2:
            replies = []
        case _:
            replies = [text]
    code = source.choice((None, None, None, *grpc.StatusCode))
    silent = source.random() < 0.05

    def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if silent:
            time.sleep(2 * TIMEOUT_SECONDS)
        yield from replies
        if code is not None and code is not grpc.StatusCode.OK:
            context.abort(code, "nonsense \x1b[2J" * 10)

    return answer


def events(source: random.Random) -> Answer:
    """Return a watch stream with random events, which may end."""
    kinds = [random_message(pb.WatchEvent, source, (A, "one")) for _ in range(source.choice((1, 3, 10)))]
    if source.random() < 0.7:
        for event in kinds:
            event.ClearField("failure")
    ends = source.random() < 0.3

    def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield pb.WatchEvent().SerializeToString()
        for event in kinds:
            yield event.SerializeToString()
            time.sleep(0.02)
        while not ends and context.is_active():
            yield pb.WatchEvent().SerializeToString()
            time.sleep(0.2)

    return answer


def frames(program: Program, source: random.Random) -> Answer:
    """Return a data stream with credits and results that the client has not requested."""
    accept = pb.Accept(answer=pb.Offer(transport="grpc")).SerializeToString()
    stream = [control_frame(FrameKind.ACCEPT, accept)] if source.random() < 0.9 else []
    for sequence in range(source.choice((0, 1, 3, 300))):
        stream.append(random_frame(source, sequence, program.outputs[0].size_bytes))

    def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from stream
        for _ in requests:
            pass

    return answer


def outcome(trial: Any) -> str:
    """Return how the use of a hostile worker ended: the name of the error, or that there was none."""
    try:
        trial()
    except TvmSplitError as error:
        return type(error).__name__
    return "no error"


def hostile_answers(program: Program, source: random.Random) -> dict[str, Answer]:
    """Most trials change only some methods, so that clients proceed further."""
    share = source.choice((0.1, 0.1, 0.5))
    answers = {method.path: nonsense(method, source) for method in ANSWERED if source.random() < share}
    watch = events(source) if source.random() < 0.7 else nonsense(METHODS["Watch"], source)
    certain = {METHODS["Describe"].path: describes_itself, METHODS["Watch"].path: watch}
    return {**certain, **answers, LINK_PATH: frames(program, source)}


def test_a_pipeline_on_a_hostile_worker(maker: ProgramMaker, trials: Trials) -> None:
    program = one_stage(maker)
    batch = batches_for(program, 1)[0]
    with HostileWorker(A) as worker:

        def use() -> None:
            options = {"timeout_seconds": TIMEOUT_SECONDS}
            with Session(Opening(program, {A: worker.endpoint}, maker.blob_path, **options)) as pipeline:
                for _ in pipeline.stream([batch] * 3):
                    pass
                pipeline.statistics()
                pipeline.trace()

        for _ in trials:
            worker.answers = hostile_answers(program, trials.source)
            trials.found[outcome(use)] += 1


def test_describing_and_timing_on_a_hostile_worker(maker: ProgramMaker, trials: Trials) -> None:
    program = one_stage(maker)
    kernels = KernelSet(A, "cpu", program.stages[0].library, KERNELS, 1 << 16)
    with HostileWorker(A) as worker:

        def use() -> None:
            describe(worker.endpoint, TIMEOUT_SECONDS)
            with RemoteKernels(worker.endpoint, TIMEOUT_SECONDS) as remote:
                remote.load(kernels, maker.blob_path)
                remote.measure(TimingEffort(1, 0.0, 0.1))

        for _ in trials:
            worker.answers = hostile_answers(program, trials.source)
            trials.found[outcome(use)] += 1
