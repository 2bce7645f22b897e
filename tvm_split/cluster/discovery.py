"""Ask the workers that a service lists to describe themselves; leave out those that cannot be deployed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rpc_runtime.client.worker_client import WorkerDescription, describe
from rpc_runtime.errors import TvmSplitError
from rpc_runtime.program.routes import CLIENT
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError


@dataclass(frozen=True)
class AskedMachine:
    """A machine with its worker's description, or with the ``reason`` why nothing can be deployed to it.

    ``is_fault`` says whether the reason is a fault, as opposed to a normal state such as tuning.
    """

    endpoint: WorkerEndpoint
    worker: WorkerDescription | None = None
    reason: str = ""
    is_fault: bool = False

    @property
    def name(self) -> str:
        return self.endpoint.machine

    @property
    def machine(self) -> Machine | None:
        """The machine to plan on; None if there is a ``reason`` against it."""
        if self.reason or self.worker is None:
            return None
        return Machine(self.name, self.worker.threads, endpoint=self.endpoint)


def ask(endpoint: WorkerEndpoint, timeout_seconds: float, threads: int | None = None) -> AskedMachine:
    """Ask the worker at ``endpoint``, which must have the endpoint's name and, if given, this number of threads."""
    answer = AskedMachine(endpoint, is_fault=True)
    if answer.name == CLIENT:
        return replace(
            answer, reason=f"its worker is named {CLIENT!r}, as the process that deploys is: give it another --name"
        )
    answered = asked(endpoint, timeout_seconds)
    worker = answered.worker
    if worker is None:
        return answered
    if worker.machine != answer.name or threads not in (None, worker.threads):
        return replace(
            answer,
            worker=worker,
            reason=f"it should be {answer.name!r}{f' with {threads} threads' if threads else ''}, and the worker that "
            f"answers is {worker.machine!r} with {worker.threads}",
        )
    return answered


def asked(endpoint: WorkerEndpoint, timeout_seconds: float) -> AskedMachine:
    """Ask the worker at ``endpoint``, whoever it is; no answer is a fault."""
    try:
        return AskedMachine(endpoint, describe(endpoint, timeout_seconds))
    except TvmSplitError as error:
        return AskedMachine(endpoint, reason=f"its worker does not answer: {error}", is_fault=True)


def planned_machines(
    answers: Sequence[AskedMachine], place: str, advice: str
) -> tuple[tuple[Machine, ...], dict[str, str]]:
    """Return the machines to plan on, sorted by name, and the reasons for the others, keyed by name and address.

    ``place`` is the start of the error message's sentence; ``advice`` says how to add a machine.

    Raises:
        ClusterError: there is no machine, or two of them have the same name.
    """
    chosen = [machine for answer in answers if (machine := answer.machine) is not None]
    machines = tuple(sorted(chosen, key=lambda machine: (machine.name, machine.address or "")))
    left_out = {f"{answer.name} at {answer.endpoint.address}": answer.reason for answer in answers if answer.reason}
    if not machines:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
        raise ClusterError(f"{place} has no machine that can be deployed to; {advice}{reasons}")
    for first, second in pairwise(machines):
        if first.name == second.name:
            raise ClusterError(
                f"{place} has two machines named {first.name!r}, at {first.address} and {second.address}: start their "
                "workers with --name, each with one of its own"
            )
    return machines, left_out
