"""Observe a running deployment that belongs to somebody else; it needs the workers' token, and changes nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rpc_runtime.client.asking import Answer, answers_of, on_every_machine
from rpc_runtime.client.worker_client import ANSWER_SECONDS, WorkerClient, WorkerDescription
from rpc_runtime.errors import DeadlineError, ProtocolError, TvmSplitError, WorkerError, WorkerUnavailableError
from rpc_runtime.processes import Closing
from rpc_runtime.program.clocks import MachineClock
from rpc_runtime.program.events import Observation
from rpc_runtime.wire.channels import WorkerEndpoint

HELD = " (held)"
"""The end of the model's name of a deployment that only keeps stages loaded."""


@dataclass(frozen=True)
class RunningDeployment:
    """A deployment on ``machines``; ``name``, ``model`` and ``owner`` are those of `HeldDeployment`."""

    name: str
    model: str
    owner: str
    machines: tuple[str, ...] = ()

    def __str__(self) -> str:
        owner = f" of {self.owner}" if self.owner else ""
        return f"{self.name} ({self.model or 'a model'}{owner} on {', '.join(self.machines)})"


def running_on(workers: Mapping[str, WorkerDescription]) -> list[RunningDeployment]:
    """Return the deployments that run on these machines' workers."""
    running: dict[str, RunningDeployment] = {}
    for machine, worker in workers.items():
        for held in (one for one in worker.deployments if not one.model.endswith(HELD)):
            known = running.get(held.name) or RunningDeployment(held.name, held.model, held.owner)
            running[held.name] = replace(known, machines=(*known.machines, machine))
    return list(running.values())


def chosen(running: list[RunningDeployment], name: str | None) -> RunningDeployment:
    """Return the deployment that has this name, or whose model has it; None means the only deployment.

    Raises:
        WorkerError: no deployment fits, or several do.
    """
    fitting = [one for one in running if name is None or name in (one.name, one.model)]
    if len(fitting) == 1:
        return fitting[0]
    wanted = "" if name is None else f" named {name!r}"
    if not fitting:
        others = f"; these do: {'; '.join(map(str, running))}" if running else ""
        raise WorkerError(f"no deployment{wanted} runs on these workers{others}")
    raise WorkerError(f"several deployments{wanted} run on these workers; choose one: {'; '.join(map(str, fitting))}")


class Bystander(Closing):
    """Observes a deployment through its workers; the client's own events are not available. A context manager.

    Raises the errors of `WorkerClient.describe` if a worker does not answer.
    """

    def __init__(self, endpoints: Mapping[str, WorkerEndpoint], deployment: RunningDeployment) -> None:
        self.machines = deployment.machines
        self._clients = {machine: WorkerClient(endpoints[machine], deployment.name) for machine in deployment.machines}
        try:
            on_every_machine(self._clients, lambda machine: self._clients[machine].describe(ANSWER_SECONDS))
        except BaseException:
            self.close()
            raise

    def observe(
        self, since: Mapping[str, int] | None = None, *, kernels: int = 0, refused: dict[str, str] | None = None
    ) -> dict[str, Observation]:
        """Return what the machines that answer have recorded, by machine; malformed answers are left out.

        For the arguments, see `Runner.observe`.

        Raises:
            WorkerError: no machine has the deployment any more.
        """
        numbers = {machine: None if since is None else since.get(machine, 0) for machine in self._clients}
        return self._ask(
            lambda client: client.observe(ANSWER_SECONDS, numbers[client.endpoint.machine], kernels), refused
        )

    def _ask(
        self, question: Callable[[WorkerClient], Answer], refused: dict[str, str] | None = None
    ) -> dict[str, Answer]:
        seen, errors = answers_of(self._clients, lambda machine: question(self._clients[machine]))
        if not seen:
            raise _nobody(list(errors.values()))
        if refused is not None:
            refused.update((name, str(error)) for name, error in errors.items() if isinstance(error, ProtocolError))
        return seen

    def about(self) -> dict[str, bytes]:
        """Return the client's ``about`` from each machine that answers, by machine: untrusted JSON, or b"".

        Raises:
            WorkerError: no machine has the deployment any more.
        """
        return self._ask(lambda client: client.about(ANSWER_SECONDS))

    def clocks(self) -> Mapping[str, MachineClock]:
        return {machine: client.clock for machine, client in self._clients.items()}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _nobody(answers: Sequence[TvmSplitError]) -> TvmSplitError:
    """Return the error for a deployment of which every answer is an error: it has ended, or no machine answers."""
    unreachable = [one for one in answers if isinstance(one, WorkerUnavailableError | DeadlineError)]
    if len(unreachable) == len(answers):
        return WorkerUnavailableError(f"no machine of the deployment answers: {answers[0]}")
    ended = next(one for one in answers if one not in unreachable)
    return WorkerError(f"the deployment has ended: {ended}") if isinstance(ended, WorkerError) else ended
