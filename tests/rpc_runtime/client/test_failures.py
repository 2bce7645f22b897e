"""If a machine dies, hangs, or misbehaves, the user soon gets an error that names the cause."""

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm.relax import op

from rpc_runtime.client import placement
from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from rpc_runtime.client.worker_client import describe
from rpc_runtime.errors import BlobError, DeadlineError, ProtocolError, StageError, WorkerError, WorkerUnavailableError
from rpc_runtime.program.specs import TensorSpec
from rpc_runtime.transports.liveness import LinkTimeouts, WatchTimeouts
from rpc_runtime.transports.transport import LinkSetting
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.worker.config import SILENCE_VARIABLE
from tests.helpers.mappings import removed_libraries
from tests.helpers.relay import Relay
from tests.helpers.rpc_runtime.hostile_worker import HostileWorker, describes_itself
from tests.helpers.rpc_runtime.pipelines import deployments_left, open_on, placed_on
from tests.helpers.rpc_runtime.program_maker import Body, ProgramMaker
from tests.helpers.rpc_runtime.programs import A, B, C, batches_for, chain, double, endless
from tests.helpers.rpc_runtime.raw_calls import METHODS
from tests.helpers.rpc_runtime.recoveries import kill
from tests.helpers.waiting import PATIENCE_SECONDS, eventually, stopped


@pytest.fixture
def own_workers() -> Iterator[LocalWorkers]:
    with LocalWorkers([A, B, C]) as started:
        yield started


SHORT = LinkTimeouts.of_silence(2.0)


@pytest.fixture(scope="module")
def quick_workers() -> Iterator[LocalWorkers]:
    """Workers for which a silent link soon counts as dead."""
    with LocalWorkers([A, B, C], environment={SILENCE_VARIABLE: str(SHORT.silence_seconds)}) as started:
        yield started


def test_a_killed_worker_is_named_and_not_its_neighbour(mortals: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    pipe = open_on(mortals, program, maker)
    results = pipe.stream(endless(program))
    assert len(list(itertools.islice(results, 50))) == 50
    kill(mortals, B)
    with pytest.raises(WorkerUnavailableError) as caught:
        list(results)
    for word in (B, mortals.endpoints[B].address):
        assert word in str(caught.value)
    done = re.search(r"'two' \(at least (\d+) micro-batches done\)", str(caught.value))
    assert done is not None
    assert int(done[1]) >= 50  # each result that the client holds was computed there
    with pytest.raises(WorkerUnavailableError, match=B):
        pipe.run(batches_for(program, 1)[0])
    pipe.close()
    x = TensorSpec("x", (2, 8), "float32")
    rest = ProgramMaker(maker.folder)
    assert rest.input("x") == x
    survivor = rest.program([rest.stage("one", C, [x], double)])
    with open_on(mortals, survivor, rest) as again:  # the other workers still run
        again.run(batches_for(survivor, 1)[0])
    assert deployments_left(mortals.endpoints[C]) == ()


def test_a_hanging_worker_is_named(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    with open_on(workers, program, maker) as pipe:
        results = pipe.stream(endless(program))
        next(results)
        with (
            stopped(workers.process_ids[B]),
            pytest.raises(WorkerUnavailableError, match=f"{B}.*silent for .* seconds, and does not answer.*'two'"),
        ):
            list(results)


def test_a_worker_that_is_frozen_is_not_waited_for_at_the_end(
    workers: LocalWorkers, maker: ProgramMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "UNLOAD_SECONDS", 10 * PATIENCE_SECONDS)
    pipe = open_on(workers, chain(maker), maker)
    with stopped(workers.process_ids[B]):
        closing = threading.Thread(target=pipe.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_SECONDS)
        assert not closing.is_alive()
    assert [deployments_left(workers.endpoints[name]) for name in (A, B, C)] == [(), (), ()]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_frozen_link_is_named_with_both_ends(
    quick_workers: LocalWorkers, maker: ProgramMaker, streaming: bool
) -> None:
    program = chain(maker)
    with (
        Relay(quick_workers.endpoints[C].address) as relay,
        open_on(quick_workers, program, maker, timeouts=SHORT, links={(B, C): LinkSetting(relay.address)}) as pipe,
    ):
        results = pipe.stream(endless(program)) if streaming else pipe.stream(batches_for(program, 1))
        next(results)
        if not streaming:
            assert list(results) == []
        relay.freeze()
        # Long before the deadline of a result, and before gRPC itself closes the connection.
        with pytest.raises(WorkerUnavailableError, match="nothing has arrived for 2 seconds") as caught:
            list(results if streaming else pipe.stream(batches_for(program, 1)))
        assert B in str(caught.value)
        assert C in str(caught.value)
    ends = quick_workers.endpoints
    assert deployments_left(ends[B]) == deployments_left(ends[C]) == ()


def test_a_slow_link_is_not_taken_for_dead(quick_workers: LocalWorkers, maker: ProgramMaker) -> None:
    """A micro-batch that takes longer than the silence after which a link counts as dead."""
    x = maker.input("x", (2048, 2048))  # frames of 1 MiB, each of which takes an eighth of that silence
    program = maker.program([maker.stage("two", B, [maker.stage("one", A, [x], double)], double)])
    seconds = 2 * SHORT.silence_seconds
    with (
        Relay(quick_workers.endpoints[B].address, bytes_per_second=x.size_bytes / seconds) as relay,
        open_on(quick_workers, program, maker, timeouts=SHORT, links={(A, B): LinkSetting(relay.address)}) as pipe,
    ):
        batch = batches_for(program, 1)[0]
        (result,) = pipe.run(batch)
        np.testing.assert_array_equal(result, 4 * batch[0])


_CLIENT = """
import sys
from pathlib import Path
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.client.opening import Opening
from rpc_runtime.client.session import Session
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import batches_for, chain

maker = ProgramMaker(Path(sys.argv[1]))
program = chain(maker)
endpoints = {name: WorkerEndpoint(name, address, token) for name, address, token in map(str.split, sys.argv[2:])}
pipeline = Session(Opening(program, endpoints, maker.blob_path))
pipeline.run(batches_for(program, 1)[0])
print("running", flush=True)
sys.stdin.read()
"""


def client_command(code: str, workers: LocalWorkers, folder: Path) -> list[str]:
    ends = [f"{endpoint.machine} {endpoint.address} {endpoint.token}" for endpoint in workers.endpoints.values()]
    return [sys.executable, "-c", code, str(folder / "blobs"), *ends]


@pytest.mark.slow
def test_a_client_that_stands_still_is_given_up(own_workers: LocalWorkers, tmp_path: Path) -> None:
    client_process = subprocess.Popen(
        client_command(_CLIENT, own_workers, tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert client_process.stdout is not None
        assert client_process.stdout.readline() == "running\n"
        assert all(removed_libraries(process_id) for process_id in own_workers.process_ids.values())
        client_process.send_signal(signal.SIGSTOP)
        for process_id in own_workers.process_ids.values():
            eventually(
                lambda number=process_id: not removed_libraries(number), "the silent client's libraries are gone"
            )
    finally:
        client_process.kill()
        client_process.communicate()


_BUSY = "pipeline.run(batches_for(program, 1)[0]); " + (
    # One call in C that keeps Python's lock, as when sorting or parsing large data.
    "import ctypes; ctypes.PyDLL(None).sleep(7); pipeline.run(batches_for(program, 1)[0]); pipeline.close()"
)


@pytest.mark.slow
def test_a_client_whose_python_stands_still_is_not_given_up(own_workers: LocalWorkers, tmp_path: Path) -> None:
    code = _CLIENT.replace("sys.stdin.read()", _BUSY)
    client = subprocess.run(
        client_command(code, own_workers, tmp_path), capture_output=True, text=True, timeout=90, check=False
    )
    assert (client.returncode, client.stderr) == (0, "")


def test_no_progress_names_the_stage(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    watch = WatchTimeouts(silence_seconds=PATIENCE_SECONDS)
    with open_on(workers, program, maker, timeout_seconds=3.0, watch=watch) as pipe:
        pipe.run(batches_for(program, 1)[0])
        with (
            stopped(workers.process_ids[C]),
            pytest.raises(DeadlineError, match=rf"stage '(two|three)' on machine '({B}|{C})'"),
        ):
            pipe.run(batches_for(program, 1)[0])
        pipe.run(batches_for(program, 1)[0])


@pytest.mark.parametrize(
    ("columns", "body", "words"),
    [
        (9, double, f"stage 'two' on machine '{B}'"),
        (8, lambda x: [*double(x), *double(x)], r"tuple of 1 tensors.* of 2"),
    ],
    ids=["compiled for another shape", "another number of results"],
)
def test_a_stage_that_fails_is_named(
    workers: LocalWorkers, maker: ProgramMaker, columns: int, body: Body, words: str
) -> None:
    program = chain(maker)
    broken = ProgramMaker(maker.folder)
    broken.stage("two", B, [TensorSpec("x", (2, columns), "float32")], body)
    first, second, third = program.stages
    program = replace(program, stages=(first, replace(second, library=broken.stages[0].library), third))
    with open_on(workers, program, maker) as pipe, pytest.raises(StageError, match=words):
        pipe.run(batches_for(program, 1)[0])
    assert deployments_left(workers.endpoints[B]) == ()


def test_a_changed_blob_is_refused(workers: LocalWorkers, maker: ProgramMaker) -> None:
    x = maker.input("x")
    weight = np.random.default_rng(1).random((2, 8)).astype(np.float32)
    stage = maker.stage("one", A, [x], lambda a, b: double(a), weights={"w": weight})
    program = maker.program([stage])
    path = maker.blob_path(program.stages[0].weights[0].blob.sha256)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BlobError, match=f"{A}.*changed"):
        open_on(workers, program, maker)
    path.unlink()
    with pytest.raises(BlobError, match="cannot read blob"):
        open_on(workers, program, maker)


def test_blobs_that_changed_on_a_workers_disk_are_sent_again(maker: ProgramMaker, tmp_path: Path) -> None:
    weights = {name: np.full((2, 8), value, np.float32) for name, value in (("w", 2), ("v", 3))}
    x = maker.input("x")
    program = maker.program([maker.stage("one", A, [x], lambda a, *w: [op.add(a, w[0])], weights=weights)])
    batch = batches_for(program, 1)[0]
    with LocalWorkers([A], cache=tmp_path / "cache") as workers:
        for _ in range(2):
            with open_on(workers, program, maker) as pipe:
                np.testing.assert_array_equal(pipe.run(batch)[0], batch[0] + 2)
                assert pipe.blob_bytes_sent == sum(blob.size_bytes for blob in program.stages[0].blobs)
            for path in (tmp_path / "cache" / "blobs").glob("*/*"):
                path.write_bytes(bytes(path.stat().st_size))


def test_all_machines_that_were_frozen_before_are_named(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    with (
        stopped(workers.process_ids[A]),
        stopped(workers.process_ids[C]),
        pytest.raises(WorkerUnavailableError, match=rf"(?s)2 machines.*'{A}'.*did not answer in time.*'{C}'"),
    ):
        open_on(workers, program, maker, timeout_seconds=3.0)
    with open_on(workers, program, maker) as pipe:
        pipe.run(batches_for(program, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("step", ["described", "watched", "sent"])
def test_a_machine_that_freezes_while_it_is_deployed_to(workers: LocalWorkers, maker: ProgramMaker, step: str) -> None:
    """It is noticed long before the calls to the machine time out."""
    program = chain(maker)
    with contextlib.ExitStack() as frozen:

        def freeze(wanted: str) -> None:
            if wanted == step:
                frozen.enter_context(stopped(workers.process_ids[B]))

        freeze("described")
        with pytest.raises(
            WorkerUnavailableError, match=rf"machine '{B}' .*(within 5 seconds|does not answer|in time)"
        ):
            open_on(
                workers,
                program,
                maker,
                check=lambda *described: freeze("watched"),
                on_transfer=lambda machine, sent, total: freeze("sent") if (machine, sent) == (B, 0) else None,
                timeout_seconds=4 * PATIENCE_SECONDS,
            )


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:9", "Connection refused"), ("no-such-host.invalid:7000", "[^:]*")]
)
def test_a_worker_that_cannot_be_reached_is_described_without_grpcs_words(address: str, reason: str) -> None:
    expected = rf"machine 'x' at {address} cannot be reached: {reason}\. Is its worker running\?"
    with pytest.raises(WorkerUnavailableError, match=f"^{expected}$"):
        describe(WorkerEndpoint("x", address), PATIENCE_SECONDS)


def test_all_calls_that_describe_a_worker_have_one_deadline() -> None:
    seconds, left = 8.0, []

    def slowly(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        left.append(context.time_remaining())
        time.sleep(0.1)
        yield from describes_itself(requests, context)

    with HostileWorker(A, {METHODS["Describe"].path: slowly}) as worker:
        describe(worker.endpoint, seconds)
    assert left[-1] < seconds - 0.2  # what has passed at least; gRPC rounds deadlines up


def test_a_neighbour_that_only_the_client_can_reach(workers: LocalWorkers, maker: ProgramMaker) -> None:
    """Machine A gets an address of machine B that cannot be reached."""
    program = chain(maker)
    with pytest.raises(WorkerError, match=rf"'{A}' cannot send to its neighbour: machine '{B}' at 127.0.0.1:9"):
        open_on(workers, program, maker, links={(A, B): LinkSetting("127.0.0.1:9")}, timeout_seconds=10.0)


def test_a_client_that_vanishes_leaves_nothing_behind(workers: LocalWorkers, maker: ProgramMaker) -> None:
    program = chain(maker)
    for endpoint in workers.endpoints.values():
        assert deployments_left(endpoint) == ()
    with placed_on(workers, program, maker) as opened:
        assert len(describe(workers.endpoints[A], PATIENCE_SECONDS).deployments) == 1
        opened.close(unload=False)  # as the end of the client's process does
        for endpoint in workers.endpoints.values():
            assert deployments_left(endpoint) == ()


def test_a_worker_that_answers_without_a_reply(maker: ProgramMaker) -> None:
    program = chain(maker)
    with HostileWorker(A, {METHODS["MissingBlobs"].path: lambda requests, context: iter(())}) as worker:
        endpoints = {name: replace(worker.endpoint, machine=name) for name in program.machines}
        with pytest.raises(ProtocolError, match=f"machine '{A}'.*MissingBlobs without a reply"):
            Session(Opening(program, endpoints, maker.blob_path, timeout_seconds=PATIENCE_SECONDS))
