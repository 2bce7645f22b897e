"""Stages move away from machines that drain, and back to those that return: each result comes once, and in order."""

import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm.relax import op

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.placement import Placement
from rpc_runtime.client.returns import MoveTimes, Returns
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import WorkerDescription, describe
from rpc_runtime.errors import TvmSplitError, WorkerError
from rpc_runtime.program.program import InputSlice, Program
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.transports.liveness import WatchTimeouts
from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.pipelines import deployments_left, same
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain, double, one_stage
from tests.helpers.rpc_runtime.recoveries import AnyMachine, drain, in_the_middle, kill
from tests.helpers.rpc_runtime.worker_process import Start, ready
from tests.helpers.waiting import PATIENCE_SECONDS, eventually

SOON = MoveTimes(empty_seconds=0.5, ask_seconds=0.05, ask_later_seconds=0.05, steady_seconds=0.1)


class Restarting(AnyMachine):
    """Workers that ended are started again, each time at another address."""

    def refresh(self) -> None:
        for name in self._workers.ended:
            self._workers.restart(name)


class Opened:
    """A session with its events; ``on`` has what is done at the first event of a kind."""

    def __init__(self, workers: LocalWorkers, program: Program, maker: ProgramMaker, **options: object) -> None:
        self.events: list[DeploymentEvent] = []
        self.on: dict[str, Callable[[], object]] = {}
        recovery = options.pop("recovery", AnyMachine(program, workers))
        move_times = options.pop("move_times", SOON)
        opening = Opening(
            program,
            workers.endpoints,
            maker.blob_path,
            timeout_seconds=PATIENCE_SECONDS,
            recovery=recovery,  # type: ignore[arg-type]
            watch=WatchTimeouts(silence_seconds=PATIENCE_SECONDS),  # no false alarm on a busy machine
            **options,  # type: ignore[arg-type]
        )
        self.session = Session(opening, self._take, move_times)  # type: ignore[arg-type]

    def _take(self, event: DeploymentEvent) -> None:
        self.events.append(event)
        self.on.pop(event.kind, lambda: None)()

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """What happened, without attempts to move that failed: on a busy machine they are made again."""
        return [(event.kind, event.machine) for event in self.events if event.kind != "not moved"]

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()


def move_to(session: Session, program: Program, maker: ProgramMaker, **more: Any) -> None:
    session.move(replace(session.opening, program=program, blob_path=maker.blob_path, **more))


def test_a_machine_is_drained_and_comes_back(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batches = batches_for(program, 200)
    with Opened(mortals, program, maker) as opened:
        session = opened.session
        expected = [tuple(session.run(batch)) for batch in batches]
        stream = session.stream(in_the_middle(batches, 60, partial(drain, mortals.endpoints[B])))
        assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 200
        eventually(lambda: opened.kinds == [("draining", B), ("moved", B)], "its stages have moved")
        assert B not in session.program.machines
        assert deployments_left(mortals.endpoints[B]) == ()
        assert describe(mortals.endpoints[B], PATIENCE_SECONDS).draining
        with pytest.raises(WorkerError, match=f"'{B}' is drained for maintenance .* `tvm-split drain {B} --undo`"):
            Session(Opening(program, mortals.endpoints, maker.blob_path))
        drain(mortals.endpoints[B], False)
        eventually(lambda: session.program == program, "its stages are back")
        assert same(session.run(batches[0]), expected[0])
    assert opened.kinds[2:] == [("returned", B), ("moved", B)]
    assert [deployments_left(end) for end in mortals.endpoints.values()] == [(), (), ()]


def test_two_machines_drain_at_once(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batches = batches_for(program, 60)
    with Opened(mortals, program, maker) as opened:
        expected = [tuple(opened.session.run(batch)) for batch in batches]
        opened.on["draining"] = partial(drain, mortals.endpoints[C])
        stream = opened.session.stream(in_the_middle(batches, 30, partial(drain, mortals.endpoints[B])))
        assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 60
        eventually(lambda: opened.session.program.machines == (A,), "both are left")
    assert {machine for kind, machine in opened.kinds if kind == "draining"} == {B, C}


def test_all_machines_drain(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batch = batches_for(program, 1)[0]
    with Opened(mortals, program, maker) as opened:
        expected = opened.session.run(batch)
        for endpoint in mortals.endpoints.values():
            drain(endpoint)
        why = f"Drained, and free after `tvm-split drain MACHINE --undo`: {A}, {B}, {C}"
        eventually(lambda: any(why in event.cause for event in opened.events), "an event says why none moves")
        assert same(opened.session.run(batch), expected)


def test_a_machine_that_died_comes_back(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    """The worker that is started again has another address and no blobs."""
    program = chain(maker)
    batches = batches_for(program, 100)
    with Opened(mortals, program, maker, recovery=Restarting(program, mortals)) as opened:
        expected = [tuple(opened.session.run(batch)) for batch in batches]
        for _ in range(2):
            opened.events.clear()
            stream = opened.session.stream(in_the_middle(batches, 30, partial(kill, mortals, B)))
            assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 100
            eventually(lambda: opened.session.program == program and ("moved", B) in opened.kinds, "they are back")
            assert opened.kinds[:2] == [("failure", B), ("recovered", B)]
            assert ("returned", B) in opened.kinds
        assert same(opened.session.run(batches[0]), expected[0])


def test_a_machine_that_its_owner_uses_again_is_not_away(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    batch = batches_for(program, 1)[0]
    recovery, times = AnyMachine(program, mortals), replace(SOON, steady_seconds=PATIENCE_SECONDS)
    with Opened(mortals, program, maker, recovery=recovery, move_times=times) as opened:
        expected = opened.session.run(batch)
        kill(mortals, B)
        assert same(opened.session.run(batch), expected)
        mortals.restart(B)
        move_to(opened.session, program, maker, endpoints=mortals.endpoints)
        kill(mortals, C)
        assert same(opened.session.run(batch), expected)
        assert [stage.machine for stage in opened.session.program.stages[:2]] == [A, B]


def test_without_recovery_nothing_moves(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    with Opened(mortals, program, maker, recovery=None) as opened:
        drain(mortals.endpoints[B])
        assert describe(mortals.endpoints[B], PATIENCE_SECONDS).draining
        opened.session.run(batches_for(program, 1)[0])
        held = describe(mortals.endpoints[B], PATIENCE_SECONDS).deployments
        assert [one.moves for one in held] == [False]
    assert opened.events == []


def in_halves(maker: ProgramMaker) -> Program:
    """Compute as `one_stage` does, from slices of the input."""
    x = maker.input("x")
    upper, lower = (TensorSpec(name, (1, 8), "float32") for name in ("upper", "lower"))
    doubled = [maker.stage("first", B, [upper], double), maker.stage("second", C, [lower], double)]
    whole = maker.stage("whole", C, doubled, lambda *parts: [op.concat(parts)])
    slices = (InputSlice(upper, "x", 0, 0), InputSlice(lower, "x", 0, 1))
    return Program((x,), (whole,), tuple(maker.stages), input_slices=slices)


def test_another_plan_is_used_in_the_middle_of_streams_and_calls(
    mortals: LocalWorkers, maker: ProgramMaker, tmp_path: Path
) -> None:
    program = one_stage(maker)
    other_maker = ProgramMaker(tmp_path / "other")
    other = in_halves(other_maker)
    batches = batches_for(program, 120)
    with Opened(mortals, program, maker) as opened, ThreadPoolExecutor(4) as threads:
        session = opened.session
        expected = [tuple(session.run(batch)) for batch in batches]

        def move(to: Program, own: ProgramMaker) -> None:
            move_to(session, to, own, recovery=AnyMachine(to, mortals))
            assert session.program == to

        def streamed() -> list[tuple[np.ndarray, ...]]:
            return [tuple(outputs) for outputs in session.stream(batches)]

        for to, own in ((other, other_maker), (program, maker)):
            streams = [threads.submit(streamed) for _ in range(2)]
            calls = [threads.submit(session.run, batch) for batch in batches]
            move(to, own)
            for stream in streams:
                assert [same(*pair) for pair in zip(stream.result(), expected, strict=True)] == [True] * 120
            assert all(same(call.result(), right) for call, right in zip(calls, expected, strict=True))
        move(other, other_maker)
        kill(mortals, B)
        assert same(session.run(batches[0]), expected[0])
    assert [kind for kind, _ in opened.kinds] == ["moved"] * 3 + ["failure", "recovered"]


def test_a_plan_that_cannot_be_opened_changes_nothing(
    mortals: LocalWorkers, maker: ProgramMaker, tmp_path: Path
) -> None:
    program = one_stage(maker)
    other_maker = ProgramMaker(tmp_path / "other")
    batch = batches_for(program, 1)[0]
    with Opened(mortals, program, maker) as opened:
        expected = opened.session.run(batch)
        drain(mortals.endpoints[C])
        with pytest.raises(WorkerError, match=f"'{C}' is drained"):
            move_to(opened.session, in_halves(other_maker), other_maker)
        assert same(opened.session.run(batch), expected)
    assert opened.events == []


def test_a_plan_whose_spare_stages_cannot_be_loaded_leaves_nothing(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = one_stage(maker)
    elsewhere = replace(program, stages=(replace(program.stages[0], machine=B),))
    spare = replace(program, stages=(replace(program.stages[0], machine=C),))
    batch = batches_for(program, 1)[0]
    with Opened(mortals, program, maker) as opened:
        expected = opened.session.run(batch)
        drain(mortals.endpoints[C])
        with pytest.raises(WorkerError, match=f"'{C}' is drained"):
            move_to(opened.session, elsewhere, maker, holds=(spare,))
        assert deployments_left(mortals.endpoints[B]) == ()
        assert same(opened.session.run(batch), expected)


@pytest.mark.parametrize("victim", [B, C])
def test_a_machine_dies_while_another_one_or_itself_drains(
    mortals: LocalWorkers, maker: ProgramMaker, victim: str
) -> None:
    program = chain(maker)
    batches = batches_for(program, 100)
    with Opened(mortals, program, maker) as opened:
        expected = [tuple(opened.session.run(batch)) for batch in batches]
        opened.on["draining"] = partial(kill, mortals, victim)
        stream = opened.session.stream(in_the_middle(batches, 30, partial(drain, mortals.endpoints[B])))
        assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 100
        left = {A, B, C} - {B, victim}
        eventually(lambda: left == {*opened.session.program.machines}, "the stages are on what is left")
        assert same(opened.session.run(batches[0]), expected[0])


@pytest.mark.parametrize("is_new", [True, False])
def test_a_machine_dies_when_a_placement_is_connected(
    mortals: LocalWorkers, maker: ProgramMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Between the last step of opening it and its first input; the machine is new, or also of the one that runs."""
    other_maker = ProgramMaker(tmp_path / "other")
    program = one_stage(maker) if is_new else chain(maker)
    other = in_halves(other_maker)
    join, batches = Placement.join, batches_for(program, 100)

    def joined(placement: Placement) -> None:
        join(placement)
        monkeypatch.setattr(Placement, "join", join)
        kill(mortals, C)

    with Opened(mortals, program, maker) as opened:
        session = opened.session
        expected = [tuple(session.run(batch)) for batch in batches]
        monkeypatch.setattr(Placement, "join", joined)
        if is_new:
            act = partial(move_to, session, other, other_maker, recovery=AnyMachine(other, mortals))
        else:
            act = partial(drain, mortals.endpoints[B])
        stream = session.stream(in_the_middle(batches, 30, act))
        assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 100
        eventually(lambda: any(event.kind == "recovered" for event in opened.events), "it has recovered")
        assert C not in session.program.machines
        assert same(session.run(batches[0]), expected[0])


@pytest.mark.parametrize("by_owner", [True, False])
def test_closing_during_a_move(mortals: LocalWorkers, maker: ProgramMaker, by_owner: bool) -> None:
    program = chain(maker)
    elsewhere = AnyMachine(program, mortals).place({B}, dict.fromkeys((A, C)))  # type: ignore[arg-type]
    with Opened(mortals, program, maker) as opened:
        session = opened.session
        closing_thread = threading.Thread(target=session.close)

        def closed(*_: object) -> None:
            closing_thread.start()
            eventually(lambda: is_closed(session), "it is being closed")

        if by_owner:
            with pytest.raises(TvmSplitError, match="closed"):
                move_to(session, elsewhere, maker, check=closed)
        else:
            opened.on["draining"] = closed
            drain(mortals.endpoints[B])
            eventually(lambda: closing_thread.ident is not None, "it is being closed")
        closing_thread.join(PATIENCE_SECONDS)
    assert "supervisor" not in {thread.name for thread in threading.enumerate()}
    assert [deployments_left(end) for end in mortals.endpoints.values()] == [(), (), ()]


def test_a_worker_that_gets_sigterm_is_left_first(start: Start, maker: ProgramMaker) -> None:
    program = chain(maker)
    batches = batches_for(program, 200)
    options = ("--json", "--insecure", f"--drain-seconds={PATIENCE_SECONDS}")
    processes = {name: start(*options, f"--name={name}") for name in (A, B, C)}
    workers = ByHand({name: WorkerEndpoint(name, ready(process)) for name, process in processes.items()})
    with Opened(workers, program, maker) as opened:  # type: ignore[arg-type]
        expected = [tuple(opened.session.run(batch)) for batch in batches]
        stream = opened.session.stream(in_the_middle(batches, 60, processes[B].terminate))
        assert [same(outputs, right) for outputs, right in zip(stream, expected, strict=True)] == [True] * 200
        assert processes[B].wait(PATIENCE_SECONDS) == 0
        assert opened.kinds == [("draining", B), ("moved", B)]


def is_closed(session: Session) -> bool:
    try:
        session.require_usable()
    except WorkerError:
        return True
    return False


class ByHand:
    def __init__(self, endpoints: Mapping[str, WorkerEndpoint]) -> None:
        self.endpoints = endpoints


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_a_worker_does_not_wait_for_clients_that_stay(
    start: Start, maker: ProgramMaker, signals: tuple[signal.Signals, ...]
) -> None:
    """Nor after SIGINT, nor after a second SIGTERM, for those that would move and cannot."""
    process = start("--json", "--insecure", "--drain-seconds=1e9")
    workers, program = ByHand({A: WorkerEndpoint(A, ready(process))}), one_stage(maker)
    moves = signals != (signal.SIGTERM,)
    recovery = AnyMachine(program, workers) if moves else None  # type: ignore[arg-type]
    with Opened(workers, program, maker, recovery=recovery) as opened:  # type: ignore[arg-type]
        for number in signals:
            process.send_signal(number)
            if len(signals) > 1:
                eventually(lambda: [one for one in opened.events if one.kind == "not moved"], "the client knows it")
        assert process.wait(PATIENCE_SECONDS) == 0


def test_a_machine_has_to_answer_for_longer_after_each_failure() -> None:
    returns = Returns(lambda machine: None, lambda machine: None, MoveTimes())
    seconds = [returns.steady_seconds("box")]
    for _ in range(9):
        returns.failed("box")
        seconds.append(returns.steady_seconds("box"))
    assert seconds == [10, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert returns.steady_seconds("desk") == 10


def test_a_machine_returns_once_the_same_process_answers_and_does_not_drain(mortals: LocalWorkers) -> None:
    worker = describe(mortals.endpoints[A], PATIENCE_SECONDS)
    again, draining = replace(worker, process_id=worker.process_id + 1), replace(worker, draining=True)
    answers: list[WorkerDescription | None] = [None, worker, again, draining, None, worker, draining, again, again]
    asked, returned = iter(answers), list[str]()
    returns = Returns(lambda machine: next(asked), returned.append, replace(SOON, ask_seconds=0.001, steady_seconds=0))
    returns.expect(["box"])
    returns.expect(["box"])
    eventually(lambda: returned == ["box"] and not returns.away, "it has returned")
    assert next(asked, None) is None
    returns.close()
