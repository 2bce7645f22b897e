"""Which of several reports is the root cause, and when a worker's reported activity is not accepted."""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.watch import Report, ReportKind, root_cause
from rpc_runtime.errors import WorkerUnavailableError
from rpc_runtime.transports.liveness import WatchTimeouts
from rpc_runtime.wire import worker_pb2 as pb
from tests.helpers.rpc_runtime.hostile_worker import HostileWorker, describes_itself
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, one_stage
from tests.helpers.rpc_runtime.raw_calls import METHODS
from tests.helpers.waiting import PATIENCE_SECONDS

LINK = Report(ReportKind.LINK, "a", "broken", "b")
GONE = Report(ReportKind.GONE, "b", "gone")
STAGE = Report(ReportKind.STAGE, "c", "raised")


def test_a_broken_link_waits_for_a_better_reason() -> None:
    assert root_cause([], all_alive=True) is None
    assert root_cause([LINK], all_alive=False) is None
    assert root_cause([LINK, GONE], all_alive=False) is GONE
    assert root_cause([LINK, GONE, STAGE], all_alive=False) is STAGE
    assert root_cause([LINK], all_alive=True) is LINK


def link(machine: str, peer: str) -> Report:
    return Report(ReportKind.LINK, machine, "broken", peer)


def test_the_link_that_broke_the_others_is_blamed() -> None:
    # The link between b and c broke; both closed their other links, which the client and a noticed first.
    reports = [link("client", "c"), link("a", "b"), link("c", "b"), link("b", "c")]
    for order in itertools.permutations(reports):
        cause = root_cause(order, all_alive=True)
        assert cause is not None
        assert {cause.machine, cause.peer} == {"b", "c"}


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 7), r"It held the stages 'one' \(at least 7 micro-batches done\)\. "),
        ((0,), r"It held the stages 'one'\. "),
        ((), r"It held the stages 'one'\. "),
    ],
)
def test_what_a_dead_worker_had_done_is_what_it_told(
    maker: ProgramMaker, counts: tuple[int, ...], message: str
) -> None:
    """The count is a lower bound: the worker may have computed more before it died."""
    running = threading.Event()

    def watch(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield pb.WatchEvent().SerializeToString()
        for finished in counts:
            yield pb.WatchEvent(stages=[pb.StageProgress(stage="one", finished=finished)]).SerializeToString()
        running.wait(PATIENCE_SECONDS)

    program = one_stage(maker)
    with (
        HostileWorker(A, {METHODS["Watch"].path: watch}) as worker,
        Session(Opening(program, {A: worker.endpoint}, maker.blob_path, timeout_seconds=PATIENCE_SECONDS)) as pipeline,
    ):
        running.set()
        with pytest.raises(WorkerUnavailableError, match=message):
            pipeline.run(batches_for(program, 1)[0])


def test_a_worker_of_a_busy_host_has_more_time(maker: ProgramMaker) -> None:
    """It neither sends events nor answers on new connections for 2 s, and the second time not at all."""
    loads, is_silent, has_waited = iter((20.0, 0.0)), threading.Event(), threading.Event()

    def watch(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        load = next(loads)
        yield pb.WatchEvent(load=load).SerializeToString()
        is_silent.set()
        time.sleep(2.0)
        while context.is_active():
            if load:
                yield pb.WatchEvent(load=load).SerializeToString()
                has_waited.set()
            time.sleep(0.1)

    def describe(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if is_silent.is_set():
            time.sleep(2.0)
        yield from describes_itself(requests, context)

    program, soon = one_stage(maker), WatchTimeouts(silence_seconds=0.5, answer_seconds=0.5)
    answers = {METHODS["Watch"].path: watch, METHODS["Describe"].path: describe}
    with HostileWorker(A, answers) as worker:
        opening = Opening(program, {A: worker.endpoint}, maker.blob_path, timeout_seconds=PATIENCE_SECONDS, watch=soon)
        with Session(opening) as session:
            assert has_waited.wait(PATIENCE_SECONDS)
            session.require_usable()
        is_silent.clear()
        with Session(opening) as session, pytest.raises(WorkerUnavailableError, match="silent"):
            session.run(batches_for(program, 1)[0])
