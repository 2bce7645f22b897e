"""``tvm-split status``: ask workers for their description."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer
from rich.text import Text

from rpc_runtime.client.worker_client import HeldDeployment, WorkerDescription, on_every_machine
from rpc_runtime.execution.cuda_runtime import version_text
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
from tvm_split.display.cluster import transport_lines
from tvm_split.display.console import STDOUT, print_error, print_json, print_line, print_note
from tvm_split.units import bytes_text, number_text, short_list


class ExpectedLink(NamedTuple):
    """The transport that a link between two ends will use; one end may be the client."""

    source: str
    destination: str
    transport: str


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
    links = _links(answers, settings)
    if json:
        print_json({"workers": list(map(_row, answers)), "links": [link._asdict() for link in links]})
    else:
        for answer in answers:
            _print(answer)
        for line in transport_lines(links):
            print_line(line)
    if any(answer.is_fault for answer in answers):
        raise typer.Exit(1)


@contextmanager
def answering(
    machines: MachineOptions, timeout_seconds: float
) -> Iterator[tuple[Sequence[AskedMachine], Cluster | None]]:
    """Ask the workers of a location, which run while the context is open, at the same time.

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
    """Return the check of a worker; validate described targets first."""
    if all(machine.target is None for machine in cluster.machines):
        return worker_misfit
    load_tvm()
    from tvm_split.compiler.machine_targets import misfit, require_known_targets

    require_known_targets(cluster)
    return misfit


def _row(answer: AskedMachine) -> dict[str, Any]:
    """Return a worker's answer as JSON values; a normal state such as tuning is a reason, not an error."""
    place = {"machine": answer.name, "address": answer.endpoint.address}
    worker = {} if answer.worker is None else {**dataclasses.asdict(answer.worker), "worker": answer.worker.machine}
    row = {**place, "reachable": answer.worker is not None, **worker, **place, "reason": answer.reason}
    return {**row, "error": _error(answer)} if answer.is_fault else row


def _error(answer: AskedMachine) -> str:
    return f"{answer.endpoint}: {answer.reason}"


def _links(answers: Sequence[AskedMachine], settings: LinkSettings) -> list[ExpectedLink]:
    """Return the transports of the links between the client and the workers that have answered, in each direction."""
    domains = {answer.name: answer.worker.memory_domain for answer in answers if answer.worker is not None}
    domains = {CLIENT: memory_domain()} | domains
    return [
        ExpectedLink(*ends, settings.get(ends, DEFAULT).expected(domains[ends[0]], domains[ends[1]]))
        for ends in itertools.permutations(domains, 2)
    ]


def _print(answer: AskedMachine) -> None:
    """Print a paragraph for a worker, since a table would be too wide for a terminal."""
    title = Text(answer.name, "bold")
    if answer.name != answer.endpoint.address:
        title.append(f" at {answer.endpoint.address}", "not bold")
    STDOUT.print(title, soft_wrap=True)
    if answer.worker is not None:
        STDOUT.print(Text("\n".join(f"  {line}" for line in _lines(answer.worker))), soft_wrap=True)
    elif answer.is_fault:
        STDOUT.print(Text("  cannot be used", "bold red"))
    else:
        STDOUT.print(Text(f"  {answer.reason}"), soft_wrap=True)
    if answer.is_fault:
        print_error(_error(answer))


def _lines(worker: WorkerDescription) -> Sequence[str]:
    load_tvm()
    from tvm_split.compiler.targets import cpu_target, target_text

    target = target_text(cpu_target(worker.architecture, worker.cpu_features, worker.threads))
    free, total = bytes_text(worker.memory_free_bytes), bytes_text(worker.memory_total_bytes)
    gpus = [f"{device.arch} with {bytes_text(device.memory_bytes)}" for device in worker.cuda_devices]
    driver = f": {worker.cuda.problem}" * bool(worker.cuda.driver)
    if gpus:
        driver = f", driver for CUDA {version_text(worker.cuda.driver)}"
    return (
        f"worker   {worker.machine!r}, process {worker.process_id} on {worker.hostname}",
        f"machine  {worker.architecture} {target}, {worker.host_cores.text}, {free} of {total} memory free",
        f"threads  {worker.threads} for a kernel",
        f"CUDA     {short_list(gpus) or 'none'}{driver}",
        f"TVM      {worker.tvm_version}, FFI {worker.tvm_ffi_version}, numpy {worker.numpy_version}",
        f"TLS      {'yes' if worker.secure else 'no'}",
        f"holds    {short_list(list(map(_held_text, worker.deployments))) or 'no deployment'}",
    )


def _held_text(held: HeldDeployment) -> str:
    owner = f" of {held.owner}" if held.owner else ""
    weights, rate = bytes_text(held.weight_bytes), held.micro_batches_per_second
    return f"{held.model or held.name}{owner} ({weights} of weights, {number_text(rate)} micro-batches/s)"
