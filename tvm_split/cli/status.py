"""``tvm-split status``: ask workers for their description."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text

from rpc_runtime.execution.cuda_runtime import version_text
from rpc_runtime.hardware import HostCores, memory_domain
from rpc_runtime.transports.transport import DEFAULT, NO_SETTINGS, LinkSettings
from tvm_split.cli import options
from tvm_split.cli.machines import MachineOptions
from tvm_split.cli.options import WrongUseError
from tvm_split.display.console import STDOUT, print_error, print_json, print_line
from tvm_split.display.links import transport_lines
from tvm_split.units import bytes_text, short_list

if TYPE_CHECKING:
    from rpc_runtime.wire.channels import WorkerEndpoint
    from tvm_split.cluster.discovery import AskedMachine
    from tvm_split.cluster.machine import Machine
    from tvm_split.launchers.tracker import TrackedMachine


class ExpectedLink(NamedTuple):
    """The transport that a link between two ends will use; one end may be the client."""

    source: str
    destination: str
    transport: str


def status(
    found: MachineOptions,
    address: Annotated[list[str] | None, typer.Option(metavar="HOST:PORT", help="A worker to ask. Repeatable.")] = None,
    timeout: options.TimeoutOption = 5.0,
    json: options.JsonOption = False,
) -> None:
    """Ask workers for their description and deployments, and show the transports of the links between them.

    Exit code 1 if a worker does not answer, or is not the expected one.

    Example: tvm-split status --cluster lab.yaml
    """
    if found.is_elsewhere == bool(address):
        raise WrongUseError("give one of them", "--cluster, --tracker, --kubernetes, --address")
    if found.tracker is not None:
        _finish([_tracked(each) for each in _listed(found, timeout)], NO_SETTINGS, json)
        return
    if found.kubernetes is not None:
        _finish([_asked(each) for each in _pods(found, timeout)], NO_SETTINGS, json)
        return
    asked: list[tuple[Machine | None, WorkerEndpoint]]
    settings = NO_SETTINGS
    if found.is_elsewhere:
        read = found.machines()
        from tvm_split.compiler.machine_targets import require_known_targets

        require_known_targets(read)
        settings = read.link_settings
        asked = list(zip(read.machines, read.start().endpoints().values(), strict=True))
    else:
        asked = [(None, each) for each in _endpoints(address or [], found)]
    from tvm_split.cluster.discovery import ASKED_AT_ONCE

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = list(pool.map(lambda each: _ask(each[0], each[1], timeout), asked))
    _finish(answers, settings, json)


def _finish(answers: list[dict[str, Any]], settings: LinkSettings, json: bool) -> None:
    links = _links(answers, settings)
    if json:
        print_json({"workers": answers, "links": [link._asdict() for link in links]})
    else:
        _print(answers)
        for line in transport_lines(links):
            print_line(line)
    if any("error" in answer for answer in answers):
        raise typer.Exit(1)


def _endpoints(addresses: list[str], found: MachineOptions) -> list[WorkerEndpoint]:
    from rpc_runtime.wire.channels import WorkerEndpoint
    from rpc_runtime.wire.security import split_address

    for address in addresses:
        split_address(address)
    return [WorkerEndpoint(address, address, found.token, found.tls) for address in addresses]


def _pods(found: MachineOptions, timeout_seconds: float) -> tuple[AskedMachine, ...]:
    """Return every pod with the labels, including those that are not ready."""
    from tvm_split.launchers.kubernetes import pod_machines

    return pod_machines(found.kubernetes or "", found.namespace, found.token, found.tls, timeout_seconds)


def _listed(found: MachineOptions, timeout_seconds: float) -> tuple[TrackedMachine, ...]:
    """Return everything that the tracker lists, including servers that cannot be deployed to."""
    from rpc_runtime.wire.tracker import TrackerAddress
    from tvm_split.launchers.tracker import tracked_machines

    address = TrackerAddress.parse(found.tracker or "")
    return tracked_machines(address, found.key, found.token, found.tls, timeout_seconds)


def _tracked(found: TrackedMachine) -> dict[str, Any]:
    """Return a tracker's and its worker's answers; a normal state such as tuning is a reason, not an error."""
    return {**_asked(found.asked), "key": found.key, "tuned_on": found.tuned}


def _asked(found: AskedMachine) -> dict[str, Any]:
    asked = {"machine": found.name, "address": found.endpoint.address}
    worker = {} if found.worker is None else {**dataclasses.asdict(found.worker), "worker": found.worker.machine}
    answer = {**asked, "reachable": found.worker is not None, **worker, **asked, "reason": found.reason}
    if found.is_fault:
        answer["error"] = f"{found.endpoint}: {found.reason}"
    return answer


def _ask(machine: Machine | None, endpoint: WorkerEndpoint, timeout_seconds: float) -> dict[str, Any]:
    """Return a worker's answer, or an error if there is none or it does not fit the machine of a cluster file."""
    from rpc_runtime.client.worker_client import describe
    from rpc_runtime.errors import TvmSplitError

    asked = {"machine": endpoint.machine, "address": endpoint.address}
    try:
        worker = describe(endpoint, timeout_seconds=timeout_seconds)
    except TvmSplitError as error:
        return {**asked, "reachable": False, "error": str(error)}
    problem = ""
    if machine is not None:
        from tvm_split.compiler.machine_targets import misfit

        problem = misfit(machine, worker)
    found = {**asked, "reachable": True, **dataclasses.asdict(worker), "worker": worker.machine, **asked}
    return {**found, "error": problem} if problem else found


def _links(answers: list[dict[str, Any]], settings: LinkSettings) -> list[ExpectedLink]:
    """Return the transports of the links between the client and the workers that have answered, in each direction."""
    from rpc_runtime.program.routes import CLIENT

    domains = {each["machine"]: each["memory_domain"] for each in answers if each["reachable"]}
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
        f"holds    {short_list(worker['deployments']) or 'no deployment'}",
    )
    return "\n".join(f"  {line}" for line in lines)
