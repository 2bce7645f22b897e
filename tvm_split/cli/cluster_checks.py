"""The checks of ``tvm-split doctor --cluster``: all machines at the same time, and the links; nothing is changed there.

`CHECKS` are the checks of a machine whose worker answers, in their order.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain, permutations
from typing import Any

from rpc_runtime.client.asking import on_every_machine
from rpc_runtime.client.worker_client import WorkerDescription
from rpc_runtime.errors import RAISE_FILES, TvmSplitError
from rpc_runtime.execution.cuda_code import toolkit_version
from rpc_runtime.execution.cuda_runtime import version_text
from rpc_runtime.hardware import boot_id, usable_together
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.certificates import WARNING_DAYS, seen_by_caller
from rpc_runtime.wire.security import find_token
from rpc_runtime.wire.text import cleaned
from rpc_runtime.worker.process import MINIMUM_CONNECTIONS, OWN_FILES
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import AskedMachine, worker_misfit
from tvm_split.cluster.machine import Link, Machine
from tvm_split.compiler.cuda_code import CudaNeeds, cuda_misfit
from tvm_split.compiler.machine_targets import require_known_targets
from tvm_split.compiler.targets import cannot_execute, cpu_target, target_text, unused_by
from tvm_split.display.findings import Finding, Level
from tvm_split.placement.profile import LinkProfile
from tvm_split.profiling.link_model import LEAST_LARGEST_BYTES, SMALLEST_BYTES, are_close
from tvm_split.profiling.link_probing import Ends, kept_links, probe_links
from tvm_split.profiling.store import default_folder
from tvm_split.progress import step_progress
from tvm_split.units import age_text, bytes_text, count_text, seconds_text, short_list

WRONG_CLOCK_SECONDS = 60.0
"""Clocks that differ by more are not set: NTP keeps them within a second."""
LITTLE_BYTES = 10**9
"""Less free memory or disk is little: the weights of a larger network alone need more."""
COMPARED_BYTES = (SMALLEST_BYTES, LEAST_LARGEST_BYTES)
"""Sizes of tensors whose transfers are compared with earlier ones."""
OK, WARNING, PROBLEM = Level


@dataclass(frozen=True)
class CheckedMachine:
    """A machine with its ``worker``, which has answered; ``workers`` are all workers of the cluster that have.

    ``entry`` is the machine as its cluster describes it; without target and limits if a service lists it.
    """

    answer: AskedMachine
    worker: WorkerDescription
    entry: Machine
    workers: Sequence[WorkerDescription]

    @property
    def sharing(self) -> list[WorkerDescription]:
        """The workers on the machine's host, its own included."""
        return [worker for worker in self.workers if worker.host == self.worker.host]


Result = tuple[str, bool] | None
"""What was found, and whether it is right; None if a check does not concern the machine."""
CHECKS: list[Callable[[CheckedMachine], Finding | None]] = []


def _check(name: str, level: Level, meaning: str, remedy: str) -> Callable[[Callable[[CheckedMachine], Result]], None]:
    """Return a decorator that adds a check to `CHECKS`; level, meaning and remedy are shown if the check fails."""

    def add(check: Callable[[CheckedMachine], Result]) -> None:
        def finding(machine: CheckedMachine) -> Finding | None:
            try:
                result = check(machine)
            except (TvmSplitError, OSError) as error:
                result = cleaned(str(error)), False
            if result is None or result[1]:
                return None if result is None else Finding(machine.answer.name, name, OK, result[0])
            return Finding(machine.answer.name, name, level, result[0], meaning, remedy)

        CHECKS.append(finding)

    return add


def machine_findings(answers: Sequence[AskedMachine], cluster: Cluster | None) -> list[Finding]:
    """Check every machine that was asked; ``cluster`` describes them unless a service lists them."""
    workers = [answer.worker for answer in answers if answer.worker is not None]

    def findings(place: int) -> list[Finding]:
        answer = answers[place]
        if answer.worker is None:
            level, remedy = PROBLEM if answer.is_fault else WARNING, "start its worker, or correct its entry's access"
            found = f"{answer.endpoint.address}: {answer.reason}"
            return [Finding(answer.name, "worker", level, found, "nothing can be deployed to it", remedy)]
        machine = CheckedMachine(answer, answer.worker, _entry(answer, cluster), workers)
        return [finding for check in CHECKS if (finding := check(machine)) is not None]

    return list(chain.from_iterable(on_every_machine(range(len(answers)), findings).values()))


def _entry(answer: AskedMachine, cluster: Cluster | None) -> Machine:
    entry = Machine(answer.name or "-") if cluster is None else cluster.machine(answer.name)
    return replace(entry, endpoint=answer.endpoint)


@_check("worker", PROBLEM, "nothing can be deployed to it", "correct its entry, or start the worker with other options")
def _worker(machine: CheckedMachine) -> Result:
    worker, answer = machine.worker, machine.answer
    misfit = answer.reason or worker_misfit(machine.entry, worker)
    if [other.machine for other in machine.workers].count(worker.machine) > 1:
        misfit = misfit or f"several workers are named {worker.machine!r}"
    return misfit or f"{answer.endpoint.address} answers in {seconds_text(worker.round_trip_seconds)}", not misfit


@_check("TVM", PROBLEM, "bundles compiled here are refused there", "install the same versions on both")
def _tvm(machine: CheckedMachine) -> Result:
    there = f"{machine.worker.tvm_version}, FFI {machine.worker.tvm_ffi_version}"
    here = f"{version('apache-tvm')}, FFI {version('apache-tvm-ffi')}"
    return there + f"; here {here}" * (there != here), there == here


@_check("package", WARNING, "one of both lacks what the other has", "install the same version on both")
def _package(machine: CheckedMachine) -> Result:
    worker, here = machine.worker, version("tvm-split")
    found = f"{worker.package_version or 'unknown'}, protocol {worker.protocol_version}, Python {worker.python_version}"
    return found + f"; here {here}" * (worker.package_version != here), worker.package_version == here


@_check("clock", WARNING, "dates of certificates and measurements are misjudged", "set both clocks by NTP")
def _clock(machine: CheckedMachine) -> Result:
    worker = machine.worker
    if worker.boot_id and worker.boot_id == boot_id():
        return "this host's", True
    ahead, error = worker.wall_clock_offset_nanoseconds * 1e-9, seconds_text(worker.round_trip_seconds / 2)
    found = f"{seconds_text(abs(ahead))} {'ahead' if ahead > 0 else 'behind'}, with an error of at most {error}"
    return found, abs(ahead) <= WRONG_CLOCK_SECONDS


@_check("TLS", WARNING, "others can read what is sent, or soon nobody can connect", "give it a certificate in time")
def _tls(machine: CheckedMachine) -> Result:
    endpoint = machine.answer.endpoint
    if endpoint.tls is None:
        return "none", Address.parse(endpoint.address).is_loopback
    names, end = seen_by_caller(endpoint.address, endpoint.tls)
    days = (end - time.time()) / 86400
    return f"verified, for {short_list(names)}; expires in {days:.0f} days", days >= WARNING_DAYS


@_check("token", WARNING, "whoever reaches its port runs code on it", "start it with --token-file, and name it here")
def _token(machine: CheckedMachine) -> Result:
    endpoint = machine.answer.endpoint
    shown = "token" * bool(endpoint.token or find_token(endpoint.address))
    shown = shown or "certificate" * bool(endpoint.tls and endpoint.tls.certificate)
    return f"a {shown} is shown" if shown else "none, and it answers", bool(shown)


@_check("target", PROBLEM, "code for it would crash there", "leave it out: the worker reports the right one")
def _target(machine: CheckedMachine) -> Result:
    worker, entry = machine.worker, machine.entry
    own = target_text(cpu_target(worker.architecture, worker.cpu_features, worker.threads))
    if entry.target is None:
        return f"{own}, as the worker reports", True
    require_known_targets(Cluster((entry,)))
    lacking = cannot_execute(entry.target, worker.architecture, worker.cpu_features)
    return target_text(entry.target) + f", and the processor {lacking}; its own is {own}" * bool(lacking), not lacking


@_check("features", WARNING, "kernels may be slower than they could be", "leave its target out")
def _features(machine: CheckedMachine) -> Result:
    worker, target = machine.worker, machine.entry.target
    if target is None or target["kind"] != "llvm" or cannot_execute(target, worker.architecture, worker.cpu_features):
        return None
    unused = unused_by(target, worker.architecture, worker.cpu_features)
    return f"its target leaves out {short_list(unused) or 'none'}", not unused


@_check("cores", WARNING, "threads take cores from each other", "start fewer workers there, or with fewer --threads")
def _cores(machine: CheckedMachine) -> Result:
    threads = sum(worker.threads for worker in machine.sharing)
    cores = usable_together(worker.host_cores for worker in machine.sharing)
    others = [repr(worker.machine) for worker in machine.sharing if worker is not machine.worker]
    found = f"{count_text(threads, 'thread')} for {count_text(cores, 'core')}"
    return found + f", with {short_list(others)} on its host" * bool(others), not cores or threads <= cores


@_check("load", WARNING, "others compute there, so times vary", "measure and plan when they have ended")
def _load(machine: CheckedMachine) -> Result:
    worker, sharing = machine.worker, machine.sharing
    held = [f"{held.model or held.name} of {held.owner or 'somebody'}" for held in worker.deployments]
    found = f"{worker.load:.1f} of {count_text(worker.host_core_count, 'core')}; holds {short_list(held) or 'nothing'}"
    of_others = worker.load - sum(peer.threads for peer in sharing if peer.deployments)
    return found, of_others <= max(worker.host_core_count - sum(peer.threads for peer in sharing), 0)


@_check("memory", WARNING, "weights may not fit", "end other programs there, or set memory_bytes to less")
def _memory(machine: CheckedMachine) -> Result:
    worker, limit = machine.worker, 0 if machine.entry.has_gpu else machine.entry.memory_bytes or 0
    found = f"{bytes_text(worker.memory_free_bytes)} of {bytes_text(worker.memory_total_bytes)} free"
    found += f"; memory_bytes is {bytes_text(limit)}" * bool(limit)
    return found, worker.memory_free_bytes >= max(LITTLE_BYTES, limit) or not worker.memory_total_bytes


@_check("disk", WARNING, "weights may not fit", "free some, or start the worker with --cache on another disk")
def _disk(machine: CheckedMachine) -> Result:
    free = machine.worker.cache_free_bytes
    return f"{bytes_text(free)} free for its cache", free >= LITTLE_BYTES


@_check("files", WARNING, "it refuses callers when it has many connections", RAISE_FILES)
def _files(machine: CheckedMachine) -> Result:
    limit = machine.worker.file_limit
    return f"{limit} descriptors", limit >= OWN_FILES + MINIMUM_CONNECTIONS


@_check("GPU", PROBLEM, "no stage can run on it", "mend that, or give the machine an llvm target")
def _gpu(machine: CheckedMachine) -> Result:
    worker, entry = machine.worker, machine.entry
    devices = [
        f"{device.arch}, {bytes_text(device.memory_free_bytes)} of {bytes_text(device.memory_bytes)} free"
        for device in worker.cuda_devices
    ]
    found = f"{short_list(devices)}; driver for CUDA {version_text(worker.cuda.driver)}"
    if entry.target is None or not entry.has_gpu:
        return (f"{found}; no stage is compiled for it", True) if devices else None
    misfit = cuda_misfit(CudaNeeds(str(entry.target.get("arch")), toolkit_version()), worker)
    return f"the worker {misfit}" if misfit else found, not misfit


def link_findings(answers: Sequence[AskedMachine], cluster: Cluster | None, timeout_seconds: float) -> list[Finding]:
    """Measure the links between the client and the machines that answer; compare them with cached measurements."""
    reached = {answer.name: answer for answer in answers if answer.worker is not None}
    if not reached:
        return []
    failed: dict[Ends, TvmSplitError] = {}
    try:
        links = [(cluster and cluster.link(*ends)) or Link(*ends) for ends in permutations((CLIENT, *reached), 2)]
        tried = Cluster(tuple(_entry(answer, cluster) for answer in reached.values()), tuple(links))
        kept = kept_links(tried, default_folder())
        with step_progress("measuring links") as report:
            how: dict[str, Any] = {"timeout_seconds": timeout_seconds, "on_progress": report, "failed": failed}
            measured = probe_links(tried, (LEAST_LARGEST_BYTES,), **how).links
    except TvmSplitError as error:
        failed, measured, kept = {(CLIENT, ""): error}, (), {}
    meaning, remedy = "no tensor could pass there", "let its port through the firewall, or give the link an address"
    return [
        *(Finding(e[0], "link", PROBLEM, cleaned(str(error)), meaning, remedy) for e, error in failed.items()),
        *(_link(link, kept.get((link.source, link.destination))) for link in measured),
    ]


def _link(link: LinkProfile, kept: LinkProfile | None) -> Finding:
    found = f"to {link.destination}: {_speed(link)}, {link.transport or link.origin}"
    if kept is None or kept.origin == "given":
        return Finding(link.source, "link", OK, found)
    found += f"; {age_text(time.time() - kept.measured_at)} ago {_speed(kept)}"
    now, then = ([one.latency_seconds + size / one.bytes_per_second for size in COMPARED_BYTES] for one in (link, kept))
    if all(map(are_close, now, then)):
        return Finding(link.source, "link", OK, found)
    meaning, remedy = "plans of that time predict other transfers", "see who else uses the link, or plan with --refresh"
    return Finding(link.source, "link", WARNING, found, meaning, remedy)


def _speed(link: LinkProfile) -> str:
    return f"{bytes_text(link.bytes_per_second)}/s, {seconds_text(link.latency_seconds)}"
