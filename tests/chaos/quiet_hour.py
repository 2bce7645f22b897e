"""An hour in which nothing fails, though everything is slow: the exit code is 1 if a failure is noticed all the same.

Three clients share three workers and two cores with `LOAD` busy processes. One streams, one sends tensors of 1 MiB
over links of 256 KiB/s, which carry its heartbeats, too, and one makes long calls in C that hold Python's lock.
"""

import argparse
import ctypes
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from rpc_runtime.client.deployment_event import DeploymentEvent
from rpc_runtime.client.session import Session
from rpc_runtime.errors import TvmSplitError
from tests.chaos.client import opening_of
from tests.chaos.faults import SLOW_BYTES_PER_SECOND
from tests.chaos.lab import Lab, relayed
from tests.chaos.task import MACHINES, Arrays, Task, equal, own_folders
from tests.helpers.rpc_runtime.pipelines import over_grpc
from tests.helpers.rpc_runtime.worker_process import ROOT

LOAD = 20
CORES = 2
C_CALL_SECONDS = 7
IN_FLIGHT = 3  # 1 MiB takes 4 s at least on each of four links, and when time is up what is under way is waited for
TIMEOUT_SECONDS = 300.0
_BUSY = """\
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""


def stream(session: Session, batches: Iterator[Arrays]) -> Iterator[Arrays]:
    yield from session.stream(batches)


def call(session: Session, batches: Iterator[Arrays]) -> Iterator[Arrays]:
    for batch in batches:
        yield session.run(batch)
        ctypes.PyDLL(None).sleep(C_CALL_SECONDS)  # one call in C that keeps Python's lock, as when parsing large data


WAYS: Mapping[str, Callable[[Session, Iterator[Arrays]], Iterator[Arrays]]] = {
    "streaming": stream,
    "over a slow link": stream,
    "in long calls": call,
}
"""What the clients do."""


def client(way: str, seconds: float) -> None:
    """Carry out the task on standard input for so long; print what came of it."""
    task: Task = pickle.load(sys.stdin.buffer)
    end, events, right, wrong, error = time.monotonic() + seconds, list[DeploymentEvent](), 0, 0, ""

    def batches() -> Iterator[Arrays]:
        while time.monotonic() < end:
            yield task.batches[0]
            time.sleep(0.005)

    try:
        with Session(replace(opening_of(task), in_flight=IN_FLIGHT), on_event=events.append) as session:
            for result in WAYS[way](session, batches()):
                is_right = equal(tuple(result), task.expected[0])
                right, wrong = right + is_right, wrong + (not is_right)
    except TvmSplitError as caught:
        error = str(caught)
    causes = [event.cause for event in events if event.kind == "failure"]
    print(json.dumps({"right": right, "wrong": wrong, "false alarms": causes, "error": error}))


def _task(shape: Sequence[int], folder: Path, lab: Lab) -> Task:
    from tvm.relax import op

    from tests.helpers.rpc_runtime.program_maker import ProgramMaker

    maker = ProgramMaker(folder)
    value = maker.input("x", shape)
    for number, machine in enumerate(MACHINES[:3]):
        value = maker.stage(f"stage {number}", machine, [value], lambda x: [op.add(x, x)])
    batch = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    endpoints = {name: worker.endpoint for name, worker in lab.workers(MACHINES[:3], at_switch=False).items()}
    program = maker.program([value])
    return Task(program, endpoints, {}, folder, [[batch]], [(8 * batch,)], 1, 0, False, TIMEOUT_SECONDS)


@contextmanager
def load() -> Iterator[None]:
    """Keep `CORES` cores busy with `LOAD` processes."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY], stdin=subprocess.PIPE) for _ in range(LOAD)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.communicate()


def run(seconds: float, folder: Path, until_end: ExitStack) -> int:
    lab = Lab(folder / "lab", until_end)
    small, large = _task((2, 8), folder / "blobs", lab), _task((512, 512), folder / "blobs", lab)
    relays = until_end.enter_context(relayed(lab.workers(MACHINES[:3], at_switch=False), MACHINES[:3]))
    for relay in relays.values():
        relay.limit(SLOW_BYTES_PER_SECOND)
    ends = {name: replace(endpoint, address=relays[name].address) for name, endpoint in large.endpoints.items()}
    slow = replace(large, endpoints=ends, links=over_grpc(large.program))
    tasks = dict(zip(WAYS, (small, slow, small), strict=True))
    outputs: dict[str, bytes] = {}

    def follow(way: str) -> None:
        command = [sys.executable, "-m", "tests.chaos.quiet_hour", "--seconds", str(seconds), "--client", way]
        task = pickle.dumps(tasks[way])
        outputs[way] = subprocess.run(command, input=task, stdout=subprocess.PIPE, cwd=ROOT, check=False).stdout

    with load():
        threads = [threading.Thread(target=partial(follow, way)) for way in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results = {way: json.loads(output) if output else {"error": "it has ended"} for way, output in outputs.items()}
    print(json.dumps(results, indent=2))
    faulty = ("wrong", "false alarms", "error")
    return int(any(result.get(name) for result in results.values() for name in faulty))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--client", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.client is not None:
        client(arguments.client, arguments.seconds)
        return 0
    with own_folders() as folder, ExitStack() as until_end:
        return run(arguments.seconds, folder, until_end)


if __name__ == "__main__":
    sys.exit(main())
