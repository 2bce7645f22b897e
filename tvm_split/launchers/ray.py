"""Run workers as actors of Ray: Ray chooses the nodes and restarts lost workers; tensors do not pass through Ray.

https://docs.ray.io/en/latest/ray-core/actors.html. An actor starts a worker process on its node, since a worker loads
only TVM's runtime and handles signals in its main thread. The process always ends with its actor.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.errors import DeadlineError, WorkerUnavailableError
from rpc_runtime.processes import Closing, before_end, cleared
from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.launcher import Launcher, Started
from tvm_split.cluster.machine import Machine
from tvm_split.errors import ClusterError, last_line
from tvm_split.launchers.local import HostMachines, lettered_machines
from tvm_split.parameters import Count, Seconds

CONNECT_SECONDS = 5.0
FOREVER = -1
"""Ray's number for unlimited restarts of an actor and retries of its tasks."""
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources with an option of their own in Ray's actor API, by resource name."""


@dataclass(frozen=True)
class Ray(Launcher):
    """Workers that Ray places on its nodes, each with a CPU for each thread. Ray restarts a worker that dies.

    ``address`` is HOST:PORT of Ray's head; None is the Ray that this process is connected to, otherwise one that runs
    on this host. ``resources`` are further resources of each worker: ``{"GPU": 1, "memory": 1e9}`` (bytes), or custom
    resources of nodes; ``CPU`` overrides the threads. ``strategy`` is the placement group's.
    """

    name = "ray"
    argument = "address"
    starts_more = True

    address: str | None = None
    workers: HostMachines = 2
    threads: Count = 1
    resources: Mapping[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = field(default_factory=dict)
    strategy: Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"] = "SPREAD"
    timeout_seconds: Seconds = 60.0

    def find(self) -> Cluster:
        return Cluster(lettered_machines(self.workers, self.threads), launcher=self)

    def start(self, cluster: Cluster) -> Started:
        return RayWorkers(cluster.machines, self)


class RayWorker:
    """The actor: one worker process on the actor's node, which listens at that node's address."""

    def __init__(self, name: str, threads: int, token: str) -> None:
        import ray

        self._name = name
        host = ray.util.get_node_ip_address()
        self._workers = LocalWorkers([name], threads=threads, pin=False, host=host, token=token)

    def address(self) -> str:
        return self._workers.endpoints[self._name].address


class RayWorkers(Closing):
    """One started and answering actor for each machine, in a placement group. A context manager.

    `close` also disconnects from Ray, if this object connected to it.

    Raises:
        ClusterError: Ray is not installed in this Python, or has no such resources.
        WorkerUnavailableError: no Ray runs there, or a worker does not start.
        DeadlineError: Ray's nodes lack the resources for this number of workers.
    """

    def __init__(self, machines: Sequence[Machine], launcher: Ray) -> None:
        try:
            import ray
        except ImportError as error:
            raise ClusterError("there is no Ray here: pip install 'tvm-split[ray]', as on its nodes") from error
        self._ray, self._launcher = ray, launcher
        amounts = [{"CPU": float(machine.threads), **launcher.resources} for machine in machines]
        self._resources = [{name: amount for name, amount in needed.items() if amount} for needed in amounts]
        self._needs = " or ".join(dict.fromkeys(map(str, amounts)))
        self._token, self._id = secrets.token_hex(16), secrets.token_hex(4)
        self._actors: dict[str, Any] = {}
        self._group: Any = None
        self._joined = _join(ray, launcher.address)
        before_end(self, self.close)
        try:
            self._group = self._place()
            for index, machine in enumerate(machines):
                self._actors[machine.name] = self._start(machine, index)
            self.endpoints()
        except ValueError as error:
            self.close()
            raise ClusterError(f"Ray has no workers with the resources {self._needs}: {last_line(error)}") from error
        except BaseException:
            self.close()
            raise

    def endpoints(self) -> dict[str, WorkerEndpoint]:
        """Return the workers' current endpoints; wait for workers that Ray is restarting.

        Raises:
            WorkerUnavailableError: a worker does not start in time; the message includes its actor's error.
        """
        endpoints, seconds = {}, self._launcher.timeout_seconds
        for name, actor in self._actors.items():
            try:
                address = self._ray.get(actor.address.options(max_task_retries=FOREVER).remote(), timeout=seconds)
            except Exception as error:
                raise WorkerUnavailableError(
                    f"Ray's worker of machine {name!r} did not come up within {seconds:g} s: {last_line(error)}"
                ) from error
            endpoints[name] = WorkerEndpoint(name, str(address), self._token)
        return endpoints

    def close(self) -> None:
        """End the workers, free the placement group, and disconnect from Ray if connected here. May be called again."""
        cleared(self)
        actors, self._actors = self._actors, {}
        group, self._group = self._group, None
        if self._ray.is_initialized():
            for actor in actors.values():
                self._ray.kill(actor)
            if group is not None:
                self._ray.util.remove_placement_group(group)
            if self._joined:
                self._ray.shutdown()
        self._joined = False

    def _place(self) -> Any:
        seconds, strategy = self._launcher.timeout_seconds, self._launcher.strategy
        group = self._ray.util.placement_group(self._resources, strategy=strategy)
        if not group.wait(seconds):
            self._ray.util.remove_placement_group(group)
            available = self._ray.available_resources()
            free = {name: available[name] for name in self._resources[0] if name in available}
            raise DeadlineError(
                f"Ray found no room within {seconds:g} s for {len(self._resources)} workers with {self._needs} each "
                f"({strategy}); free are {free}: ask for less, or start more nodes"
            )
        return group

    def _start(self, machine: Machine, index: int) -> Any:
        resources = self._resources[index]
        placed = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, index)
        actor = self._ray.remote(RayWorker).options(
            **{option: resources.get(key, 0) for key, option in OPTIONS.items()},
            resources={key: amount for key, amount in resources.items() if key not in OPTIONS},
            name=f"tvm-split-{self._id}-{machine.name}",
            scheduling_strategy=placed,
            max_restarts=FOREVER,
            max_task_retries=FOREVER,
        )
        return actor.remote(machine.name, machine.threads, self._token)


def _join(ray: Any, address: str | None) -> bool:
    """Connect to Ray if this process is not connected yet, and return whether it was necessary.

    Raises:
        WorkerUnavailableError: no Ray runs there.
    """
    if ray.is_initialized():
        return False
    where = address or "this host"
    try:
        if address is not None:  # checked first, since Ray itself retries for minutes
            Address.callable(address).connect(CONNECT_SECONDS).close()
        ray.init(address=address or "auto", log_to_driver=False, logging_level="warning")
    except (OSError, ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = f"no Ray can be joined at {where} ({reason}); `ray start --head` starts one"
        raise WorkerUnavailableError(text) from error
    return True
