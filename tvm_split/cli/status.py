"""``tvm-split status``: ask workers for their description."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer
from rich.text import Text

from rpc_runtime.client.worker_client import describe, on_every_machine
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.execution.cuda_runtime import version_text
from rpc_runtime.hardware import HostCores, memory_domain
from rpc_runtime.transports.transport import DEFAULT, NO_SETTINGS, LinkSettings
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import AskedMachine, launcher_at
from tvm_split.display.console import STDOUT, print_error, print_json, print_line
from tvm_split.display.links import transport_lines
from tvm_split.units import bytes_text, number_text, short_list


class ExpectedLink(NamedTuple):
    """The transport that a link between two ends will use; one end may be the client."""

    source: str
    destination: str
    transport: str


def status(machines: MachineOptions, timeout: options.TimeoutOption = 5.0, json: options.JsonOption = False) -> None:
    """Ask workers for their description and deployments, and show the transports of the links between them.

    Exit code 1 if a worker does not answer, or is not the expected one.

    Example: tvm-split status --cluster lab.yaml
    """
    if not machines.is_elsewhere:
        raise WrongUseError("name the workers to ask", "--cluster, --tracker, --kubernetes")
    launcher = launcher_at(machines.location)
    answers, settings = launcher.ask(timeout), NO_SETTINGS
    if answers is None:
        cluster = launcher.find()
        answers, settings = _ask_all(cluster, timeout), cluster.link_settings
    rows = list(map(_row, answers))
    links = _links(rows, settings)
    if json:
        print_json({"workers": rows, "links": [link._asdict() for link in links]})
    else:
        _print(rows)
        for line in transport_lines(links):
            print_line(line)
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _ask_all(cluster: Cluster, timeout_seconds: float) -> Sequence[AskedMachine]:
    """Ask the worker of every machine; a worker that does not match its machine's description is a fault."""
    from tvm_split.compiler.machine_targets import misfit, require_known_targets  # loads TVM

    require_known_targets(cluster)

    def ask(machine: str) -> AskedMachine:
        endpoint = endpoints[machine]
        try:
            worker = describe(endpoint, timeout_seconds)
        except TvmSplitError as error:
            return AskedMachine(endpoint, reason=f"its worker does not answer: {error}", is_fault=True)
        problem = misfit(cluster.machine(machine), worker)
        return AskedMachine(endpoint, worker, problem, is_fault=bool(problem))

    with cluster as workers:
        endpoints = workers.endpoints()
        return list(on_every_machine(endpoints, ask).values())


def _row(answer: AskedMachine) -> dict[str, Any]:
    """Return a worker's answer as JSON values; a normal state such as tuning is a reason, not an error."""
    place = {"machine": answer.name, "address": answer.endpoint.address}
    worker = {} if answer.worker is None else {**dataclasses.asdict(answer.worker), "worker": answer.worker.machine}
    row = {**place, "reachable": answer.worker is not None, **worker, **place, "reason": answer.reason}
    return {**row, "error": f"{answer.endpoint}: {answer.reason}"} if answer.is_fault else row


def _links(answers: list[dict[str, Any]], settings: LinkSettings) -> list[ExpectedLink]:
    """Return the transports of the links between the client and the workers that have answered, in each direction."""
    from rpc_runtime.program.routes import CLIENT

    domains = {answer["machine"]: answer["memory_domain"] for answer in answers if answer["reachable"]}
    domains = {CLIENT: memory_domain()} | domains
    return [
        ExpectedLink(*ends, settings.get(ends, DEFAULT).expected(domains[ends[0]], domains[ends[1]]))
        for ends in itertools.permutations(domains, 2)
    ]


def _print(answers: list[dict[str, Any]]) -> None:
    """Print a paragraph for each worker, since a table would be too wide for a terminal."""
    for answer in answers:
        title = Text(answer["machine"], "bold")
        if answer["machine"] != answer["address"]:
            title.append(f" at {answer['address']}", "not bold")
        STDOUT.print(title, soft_wrap=True)
        if answer["reachable"]:
            STDOUT.print(Text(_worker_text(answer)), soft_wrap=True)
        elif "error" not in answer:
            STDOUT.print(Text(f"  {answer['reason']}"), soft_wrap=True)
        else:
            STDOUT.print(Text("  does not answer", "bold red"))
        if "error" in answer:
            print_error(answer["error"])


def _processor_text(worker: dict[str, Any]) -> str:
    from tvm_split.compiler.targets import cpu_target, target_text

    target = cpu_target(worker["architecture"], worker["cpu_features"], worker["threads"])
    cores = HostCores("", worker["core_numbers"], worker["core_quota"], worker["quota_group"])
    return f"{worker['architecture']} {target_text(target)}, {cores.text}"


def _held_text(deployment: dict[str, Any]) -> str:
    rate, owner = deployment["micro_batches_per_second"], deployment["owner"]
    return (
        f"{deployment['model'] or deployment['name']}{f' of {owner}' if owner else ''} "
        f"({bytes_text(deployment['weight_bytes'])} of weights, {number_text(rate)} micro-batches/s)"
    )


def _worker_text(worker: dict[str, Any]) -> str:
    free, total = bytes_text(worker["memory_free_bytes"]), bytes_text(worker["memory_total_bytes"])
    gpus = [f"{device['arch']} with {bytes_text(device['memory_bytes'])}" for device in worker["cuda_devices"]]
    cuda = worker["cuda"]
    driver = (
        f", driver for CUDA {version_text(cuda['driver'])}" if gpus else f": {cuda['problem']}" * bool(cuda["driver"])
    )
    lines = (
        f"worker   {worker['worker']!r}, process {worker['process_id']} on {worker['hostname']}",
        f"machine  {_processor_text(worker)}, {free} of {total} memory free",
        f"threads  {worker['threads']} for a kernel",
        f"CUDA     {short_list(gpus) or 'none'}{driver}",
        f"TVM      {worker['tvm_version']}, FFI {worker['tvm_ffi_version']}, numpy {worker['numpy_version']}",
        f"TLS      {'yes' if worker['secure'] else 'no'}",
        f"holds    {short_list(list(map(_held_text, worker['deployments']))) or 'no deployment'}",
    )
    return "\n".join(f"  {line}" for line in lines)
