"""``tvm-split status``: ask workers for their description."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

from rpc_runtime.client.worker_client import WorkerDescription, on_every_machine
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
from tvm_split.display.console import print_error, print_note
from tvm_split.display.status import Status
from tvm_split.display.view import write


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


@contextmanager
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
