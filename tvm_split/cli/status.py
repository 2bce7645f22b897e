"""``tvm-split status``, ``drain``, ``trace``, ``dashboard`` and ``report``: ask workers, and show what runs there."""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rpc_runtime.client.asking import on_every_machine
from rpc_runtime.client.bystander import Bystander, chosen, running_on
from rpc_runtime.client.worker_client import ANSWER_SECONDS, WorkerClient, WorkerDescription
from rpc_runtime.hardware import memory_domain
from rpc_runtime.option import option
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.transports.transport import DEFAULT, NO_SETTINGS, LinkSettings
from tvm_split.cli import options
from tvm_split.cli.options import WrongUseError
from tvm_split.cli.source import MachineOptions, load_tvm
from tvm_split.cluster.cluster import Cluster, cluster_of
from tvm_split.cluster.launcher import AskedMachine, ask_worker, launcher_at, worker_misfit
from tvm_split.cluster.machine import Machine
from tvm_split.display.cluster import Status
from tvm_split.display.console import STDOUT, print_error, print_json, print_line, print_note, print_unwrapped
from tvm_split.display.view import write
from tvm_split.errors import ClusterError
from tvm_split.observing.about import about_in
from tvm_split.observing.recording import Recording
from tvm_split.progress import step_progress
from tvm_split.units import known_names, short_list


def status(
    machines: MachineOptions,
    timeout: float = option(5.0, "The longest wait for a worker.", metavar="SECONDS", minimum=0.1),
    json: bool = options.JSON,
) -> None:
    """Ask workers for their description and deployments, and show the transports of the links between them.

    Exit code 1 if a worker does not answer, or is not the expected one.

    Example: tvm-split status --cluster lab.yaml
    """
    answers, settings = asked(machines, timeout)
    if not answers:
        print_note(f"{machines.location} lists no worker")
    if any(answer.worker is not None for answer in answers):
        load_tvm()
    write(Status(answers, _links(answers, settings)), json=json)
    faults = [f"{answer.endpoint}: {answer.reason}" for answer in answers if answer.is_fault]
    for text in faults if not json else ():
        print_error(text)
    if faults:
        raise typer.Exit(1)


@contextlib.contextmanager
def answering(
    machines: MachineOptions, timeout_seconds: float
) -> Iterator[tuple[Sequence[AskedMachine], Cluster | None]]:
    """Ask all workers of a location at the same time; the workers run while the context is open.

    Yield their answers, and the cluster that describes them; None if a service lists them.
    """
    if not machines.is_elsewhere:
        raise WrongUseError("name the workers to ask", "--cluster, --tracker, --kubernetes")
    launcher = launcher_at(machines.location)
    answers = launcher.ask(timeout_seconds)
    if answers is not None:
        yield answers, None
        return
    with cluster_of(launcher) as workers:
        endpoints = workers.endpoints().values()
        yield list(on_every_machine(endpoints, lambda end: ask_worker(end, timeout_seconds)).values()), workers


def asked(machines: MachineOptions, timeout_seconds: float) -> tuple[Sequence[AskedMachine], LinkSettings]:
    """Ask the workers of a location; return their answers, and the settings of the links between them.

    A worker that does not match its machine's description is a fault.
    """
    with answering(machines, timeout_seconds) as (answers, cluster):
        if cluster is None:
            return answers, NO_SETTINGS
        misfit = _misfit_of(cluster)

    def judged(answer: AskedMachine) -> AskedMachine:
        problem = answer.worker is not None and misfit(cluster.machine(answer.name), answer.worker)
        return dataclasses.replace(answer, reason=problem, is_fault=True) if problem else answer

    return list(map(judged, answers)), cluster.link_settings


def _misfit_of(cluster: Cluster) -> Callable[[Machine, WorkerDescription], str]:
    """Return a function that says why a worker does not fit its machine; raises an error for unknown targets."""
    if all(machine.target is None for machine in cluster.machines):
        return worker_misfit
    load_tvm()
    from tvm_split.compiler.machine_targets import misfit, require_known_targets

    require_known_targets(cluster)
    return misfit


def _links(answers: Sequence[AskedMachine], settings: LinkSettings) -> list[tuple[str, str, str]]:
    """Return the transports of the links between the client and the workers that have answered, in each direction."""
    domains = {answer.name: answer.worker.memory_domain for answer in answers if answer.worker is not None}
    domains = {CLIENT: memory_domain()} | domains
    return [
        (*ends, settings.get(ends, DEFAULT).expected(domains[ends[0]], domains[ends[1]]))
        for ends in itertools.permutations(domains, 2)
    ]


STEP_SECONDS = 0.1


def drain(
    machine: Annotated[str, typer.Argument(metavar="MACHINE", help="Its name in the cluster.")],
    machines: MachineOptions,
    undo: bool = option(False, "Let the machine take deployments again."),
    timeout: float = option(60.0, "The longest wait until nothing is left there.", metavar="SECONDS", minimum=0),
    json: bool = options.JSON,
) -> None:
    """Let a machine take no new deployments, and wait until those with --on-failure recover have moved away.

    Other deployments stay until they end. Exit code 1 if one is left. A worker that is started again takes deployments.

    Example: tvm-split drain box --cluster lab.yaml
    """
    with answering(machines, ANSWER_SECONDS) as (answers, _):
        endpoints = {answer.name: answer.endpoint for answer in answers}
        if machine not in endpoints:
            raise ClusterError(f"no machine is named {machine!r}; there are {known_names(list(endpoints), machine)}")
        with contextlib.closing(WorkerClient(endpoints[machine])) as worker:
            worker.drain(not undo, ANSWER_SECONDS)
            end = time.monotonic() + timeout
            while (held := worker.describe(ANSWER_SECONDS).deployments) and not undo and time.monotonic() < end:
                time.sleep(STEP_SECONDS)
    left = [] if undo else [f"{one.model or one.name} of {one.owner}" + NOT_MOVED * (not one.moves) for one in held]
    if json:
        print_json({"machine": machine, "draining": not undo, "left": left})
    elif not left:
        print_line(f"{machine} takes deployments again" if undo else f"{machine} is drained: nothing runs there")
    if left:
        print_error(f"left on {machine}: {short_list(left)}")
        raise typer.Exit(1)


NOT_MOVED = ", whose client does not move it (--on-failure raise)"


def trace(
    machines: MachineOptions,
    deployment: str | None = options.DEPLOYMENT,
    seconds: float = option(5.0, "How long to record.", minimum=0.1),
    output: Path | None = options.TRACE,
    kernels: int = options.KERNELS,
    timeout: float = option(5.0, "The longest wait for a worker.", metavar="SECONDS", minimum=0.1),
    json: bool = options.JSON,
) -> None:
    """Record what a running deployment does, and show how busy machines and links are and what limits.

    The deployment goes on as it is. What its client does is in its own trace: `tvm-split run --trace FILE`.

    Example: tvm-split trace --cluster lab.yaml --seconds 5 --output run.pftrace
    """
    answers, _ = asked(machines, timeout)
    workers = {answer.name: answer.worker for answer in answers if answer.worker is not None}
    if not workers:
        reasons = "; ".join(f"{answer.endpoint}: {answer.reason}" for answer in answers)
        raise ClusterError(f"no worker at {machines.location} answers{f': {reasons}' if reasons else ''}")
    found = chosen(running_on(workers), deployment)
    with Bystander({answer.name: answer.endpoint for answer in answers}, found) as bystander:
        about = about_in(bystander.about().values())
        recording = Recording(found.model, bystander, lambda: about, kernels)
        recording.start()
        try:
            with step_progress("recording") as report:
                begun = time.monotonic()
                while (passed := time.monotonic() - begun) < seconds:
                    report("recording", int(passed * 10), max(1, int(seconds * 10)))
                    time.sleep(min(STEP_SECONDS, seconds - passed))
        finally:
            recording.stop()
        result = recording.trace
    if output is not None:
        result.save(output)
        print_note(f"trace written to {output}")
    write(result, json=json)


def dashboard(
    machines: MachineOptions,
    deployment: str | None = options.DEPLOYMENT,
    listen: str = option(
        "127.0.0.1:8080", "Where the page is (port 0: any free port).", metavar="HOST:PORT", flag="--listen"
    ),
    insecure: bool = option(False, "Let other machines open the page, which needs no token."),
    timeout: float = option(5.0, "The longest wait for a worker.", metavar="SECONDS", minimum=0.1),
) -> None:
    """Serve a page that shows what runs on these workers, until Ctrl-C: machines, links, rates, and what limits.

    The deployment goes on as it is. While none runs, the page waits for the next one.

    Example: tvm-split dashboard --cluster lab.yaml
    """
    asked(machines, timeout)  # so that a wrong location is told at once
    from tvm_split.dashboard.live import LabPage  # imported here, since they need plotly
    from tvm_split.dashboard.page import page_server

    lab = LabPage(lambda: asked(machines, timeout)[0], deployment)
    with page_server(listen, lab.page, insecure=insecure) as server:
        print_unwrapped(f"the dashboard is at {server.url}")
        STDOUT.file.flush()
        threading.Event().wait()


def report(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.json", help="A saved trace.", exists=True, dir_okay=False)],
    output: Path | None = options.TRACE,
    json: bool = options.JSON,
) -> None:
    """Show what a saved trace says, and write it in another form, such as .html: one file to send to somebody.

    Example: tvm-split report run.json --output run.html
    """
    from tvm_split.observing.trace import Trace  # imported here, since it loads numpy

    saved = Trace.load(trace)
    if output is not None:
        saved.save(output)
        print_note(f"written to {output}")
    write(saved, json=json)
