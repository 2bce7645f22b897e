"""Workers as actors of Ray: Ray finds the nodes and starts lost ones again, tensors go from worker to worker as ever.

https://docs.ray.io/en/latest/ray-core/actors.html. An actor holds a worker process on its node, since a worker loads
TVM's runtime alone and answers signals in its main thread; it ends with its actor, however that ends.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_split.errors import ClusterError
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.closing import Closing
from tvm_split.rpc_runtime.endings import before_end, cleared
from tvm_split.rpc_runtime.errors import DeadlineError, WorkerUnavailableError
from tvm_split.rpc_runtime.wire.channels import WorkerEndpoint
from tvm_split.rpc_runtime.wire.security import split_address

CONNECT_SECONDS = 5.0
STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
FOREVER = -1
"""How often Ray starts an actor again."""


class RayWorker:
    """The actor: one worker on the node that it was placed on, at that node's own address."""

    def __init__(self, name: str, threads: int, token: str) -> None:
        import ray

        self._name = name
        host = ray.util.get_node_ip_address()
        self._workers = LocalWorkers([name], threads=threads, pin=False, host=host, token=token)

    def address(self) -> str:
        return self._workers.endpoints[self._name].address


class RayWorkers(Closing):
    """One actor for each name, in a placement group; all of them answer. A context manager.

    Ray itself is left when this is closed, if it was joined for it.

    Raises:
        ClusterError, WorkerUnavailableError, DeadlineError: as `Cluster.from_ray` says.
    """

    def __init__(
        self,
        names: Sequence[str],
        threads: int,
        address: str | None,
        resources: Mapping[str, float] | None,
        strategy: str,
        timeout_seconds: float,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ClusterError(f"Ray's strategies are {', '.join(STRATEGIES)}, got {strategy!r}")
        try:
            import ray
        except ImportError as error:
            raise ClusterError("there is no Ray here: pip install 'tvm-split[ray]', as on its nodes") from error
        self._ray = ray
        self._seconds = timeout_seconds
        self._token = secrets.token_hex(16)
        self._actors: dict[str, Any] = {}
        self._group: Any = None
        self._joined = _join(ray, address)
        before_end(self, self.close)
        try:
            each = {"CPU": float(threads), **(resources or {})}
            self._group = self._place([each] * len(names), strategy)
            for index, name in enumerate(names):
                self._actors[name] = self._start(name, threads, each, index)
            self.endpoints()
        except BaseException:
            self.close()
            raise

    def endpoints(self) -> dict[str, WorkerEndpoint]:
        """Where the workers are now; waits for those that Ray is starting again.

        Raises:
            WorkerUnavailableError: one does not come up in time; says what its actor said.
        """
        found = {}
        for name, actor in self._actors.items():
            try:
                address = self._ray.get(actor.address.options(max_task_retries=FOREVER).remote(), timeout=self._seconds)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise WorkerUnavailableError(
                    f"Ray's worker of machine {name!r} did not come up within {self._seconds:g} s: {reason}"
                ) from error
            found[name] = WorkerEndpoint(name, str(address), self._token)
        return found

    def close(self) -> None:
        """Ends the workers, gives Ray the room back, and leaves it, if it was joined here. May be called again."""
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

    def _place(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        group = self._ray.util.placement_group(bundles, strategy=strategy)
        if not group.wait(self._seconds):
            self._ray.util.remove_placement_group(group)
            has = {name: amount for name, amount in self._ray.available_resources().items() if name in bundles[0]}
            raise DeadlineError(
                f"Ray found no room within {self._seconds:g} s for {len(bundles)} workers with {bundles[0]} each "
                f"({strategy}); free are {has}: ask for less, or start more nodes"
            )
        return group

    def _start(self, name: str, threads: int, resources: Mapping[str, float], index: int) -> Any:
        others = {key: amount for key, amount in resources.items() if key not in ("CPU", "GPU")}
        placed = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, index)
        actor = self._ray.remote(RayWorker).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            resources=others,
            scheduling_strategy=placed,
            max_restarts=FOREVER,
            max_task_retries=FOREVER,
        )
        return actor.remote(name, threads, self._token)


def _join(ray: Any, address: str | None) -> bool:
    """Whether this process has joined a Ray just now.

    Raises:
        WorkerUnavailableError: none runs there.
    """
    if ray.is_initialized():
        return False
    where = address or "this host"
    try:
        if address is not None:  # Ray itself tries for minutes
            host, port = split_address(address)
            socket.create_connection((host.strip("[]"), port), CONNECT_SECONDS).close()
        ray.init(address=address or "auto", log_to_driver=False, logging_level="warning")
    except (OSError, ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = f"no Ray can be joined at {where} ({reason}); `ray start --head` starts one"
        raise WorkerUnavailableError(text) from error
    return True
