"""Show a cluster: its machines, what they answer, which transport carries which links, and values by their fields."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from rpc_runtime.client.worker_client import HeldDeployment, WorkerDescription
from rpc_runtime.execution.cuda_runtime import version_text
from rpc_runtime.transports.transport import TRANSPORTS, transport_named
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import AskedMachine
from tvm_split.display.view import Row, Table, View, as_json, view
from tvm_split.units import NAME_LETTERS, Shown, ShownFields, bytes_text, clipped, count_text, number_text, short_list


@view.register
def view_of_cluster(cluster: Cluster, *, details: bool = False) -> View:
    """Return a table with a row for each machine, and the machines that are left out."""
    rows = [
        (
            machine.name,
            machine.address or cluster.launcher.name,
            " ".join(map(str, machine.target.values())) if machine.target else "as its worker reports",
            str(machine.threads),
            "" if machine.memory_bytes is None else bytes_text(machine.memory_bytes),
        )
        for machine in cluster.machines
    ]
    title = f"{count_text(len(rows), 'machine')}: {short_list(cluster.machine_names)}"
    return [
        Table(title, ("machine", "worker", "target"), ("threads", "memory"), rows),
        *(f"left out: {name}, {reason}" for name, reason in cluster.left_out.items()),
    ]


@view.register
def view_of_fields(value: ShownFields, *, details: bool = False) -> View:
    """Return a table of the fields that differ from their defaults: of any value without a view of its own."""
    if not value.given:
        return [f"{type(value).__name__}: all fields have their defaults"]
    return [Table(type(value).__name__, ("field", "value"), (), [(n, str(v)) for n, v in value.given.items()])]


def transport_lines(links: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each transport with its links, which are given as (source, destination, transport).

    Two directions with the same transport are one entry. Links with an unknown (empty) transport are left out.
    """
    transports = {(source, destination): transport for source, destination, transport in links if transport}
    ends: dict[str, list[str]] = {}
    listed = set()
    for (source, destination), transport in transports.items():
        both_ways = transports.get((destination, source)) == transport
        if not (both_ways and (destination, source) in listed):
            ends.setdefault(transport, []).append(f"{source} {'↔' if both_ways else '→'} {destination}")
            listed.add((source, destination))
    return [f"Links over {_title(name)}: {short_list(pairs)}" for name, pairs in ends.items()]


def _title(transport: str) -> str:
    """Return a transport's title, or its name if the package that adds it is not installed here."""
    return transport_named(transport).title if transport in TRANSPORTS else transport


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """What the workers of a cluster answer, and the links between them: source, destination and expected transport."""

    answers: Sequence[AskedMachine]
    links: Sequence[tuple[str, str, str]]


@view.register
def view_of_status(status: Status, *, details: bool = False) -> View:
    """Return a table with a section for each machine, and the transports of the links."""
    rows = [row for answer in status.answers for row in _rows(answer)]
    title = count_text(len(status.answers), "machine")
    return [*[Table(title, ("machine", "", " "), (), rows)] * bool(rows), *transport_lines(status.links)]


@as_json.register
def status_as_json(status: Status) -> dict[str, Any]:
    links = [dict(zip(("source", "destination", "transport"), link, strict=True)) for link in status.links]
    return {"workers": list(map(_content, status.answers)), "links": links}


def _content(answer: AskedMachine) -> dict[str, Any]:
    """Return a worker's answer as JSON values; it has an ``error`` for faults, not for normal states such as tuning."""
    place = {"machine": answer.name, "address": answer.endpoint.address}
    worker = {} if answer.worker is None else {**asdict(answer.worker), "worker": answer.worker.machine}
    error = {"error": f"{answer.endpoint}: {answer.reason}"} if answer.is_fault else {}
    return {**place, "reachable": answer.worker is not None, **worker, **place, "reason": answer.reason, **error}


def _rows(answer: AskedMachine) -> Iterator[Row]:
    yield ()
    yield clipped(answer.name, NAME_LETTERS), "address", answer.endpoint.address
    if answer.worker is not None:
        yield from (("", name, text) for name, text in _facts(answer.worker).items())
    elif answer.is_fault:
        yield "", "state", Text("cannot be used", "bold red")
    else:
        yield "", "state", answer.reason


def _facts(worker: WorkerDescription) -> dict[str, str]:
    from tvm_split.compiler.targets import cpu_target, target_text  # imported here, since it loads TVM

    days = (worker.certificate_expires - time.time()) / 86400
    target = target_text(cpu_target(worker.architecture, worker.cpu_features, worker.threads))
    gpus = [f"{device.arch} with {bytes_text(device.memory_bytes)}" for device in worker.cuda_devices]
    driver = f": {worker.cuda.problem}" * bool(worker.cuda.driver)
    if gpus:
        driver = f", driver for CUDA {version_text(worker.cuda.driver)}"
    return {
        "worker": f"{worker.machine!r}, process {worker.process_id} on {worker.hostname}",
        "target": f"{worker.architecture} {target}",
        "threads": f"{worker.threads} for a kernel, {worker.host_cores.text}",
        "memory": f"{bytes_text(worker.memory_free_bytes)} of {bytes_text(worker.memory_total_bytes)} free",
        "CUDA": f"{short_list(gpus) or 'none'}{driver}",
        "TVM": f"{worker.tvm_version}, FFI {worker.tvm_ffi_version}, numpy {worker.numpy_version}",
        "TLS": f"expires in {days:.0f} days" if worker.secure else "no",
        "holds": short_list(list(map(_held_text, worker.deployments))) or "no deployment",
        **({"state": "draining: takes no new deployments"} if worker.draining else {}),
    }


def _held_text(held: HeldDeployment) -> str:
    owner = f" of {held.owner}" if held.owner else ""
    weights, rate = bytes_text(held.weight_bytes), held.micro_batches_per_second
    return f"{held.model or held.name}{owner} ({weights} of weights, {number_text(rate)} micro-batches/s)"
