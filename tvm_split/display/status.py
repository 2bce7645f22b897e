"""Show what the workers of a cluster answer."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from rpc_runtime.client.worker_client import HeldDeployment, WorkerDescription
from rpc_runtime.execution.cuda_runtime import version_text
from tvm_split.cluster.launcher import AskedMachine
from tvm_split.display.cluster import transport_lines
from tvm_split.display.view import Row, Table, View, as_json, view
from tvm_split.units import NAME_LETTERS, Shown, bytes_text, clipped, count_text, number_text, short_list


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
    }


def _held_text(held: HeldDeployment) -> str:
    owner = f" of {held.owner}" if held.owner else ""
    weights, rate = bytes_text(held.weight_bytes), held.micro_batches_per_second
    return f"{held.model or held.name}{owner} ({weights} of weights, {number_text(rate)} micro-batches/s)"
