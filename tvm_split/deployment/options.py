"""How a bundle is deployed: what Python calls and the command line can say about it."""

from dataclasses import dataclass
from pathlib import Path

from rpc_runtime.errors import InputError
from rpc_runtime.option import option
from tvm_split.parameters import Count, Natural, OnFailure, Seconds, fit_fields


@dataclass(frozen=True)
class DeployOptions:
    """Options of `deploy`.

    ``timeout_seconds`` limits every wait: for a worker to answer, and for the next result.

    A lower ``in_flight`` gives each result sooner after its input, until machines have to wait. By default as many
    micro-batches of a stream are in flight as the queues between stages hold; for a measured plan for latency, its
    ``prediction.in_flight``. In one process there is never more than one.

    If a machine fails, ``on_failure="recover"`` moves its stages to the machines that are left, without losing a
    result, or ends the deployment if that is impossible; ``"raise"`` always ends it. Machines on ``standby`` hold all
    stages that they can: first those that the cluster says are on standby; a cluster of this host gets so many workers
    more. With ``spares``, machines with stages hold those that would move to them. A recovery then sends and reads no
    weights. ``failure_timeout_seconds`` is by default 1, or the time of 1 MiB on the machine's slowest known link if
    that is longer.
    """

    timeout_seconds: Seconds = option(
        60.0, "The longest wait for a worker or a result.", flag="--timeout", metavar="SECONDS", minimum=0.1
    )
    in_flight: Count | None = option(
        None,
        "The most micro-batches in flight (default: as many as queues hold; for latency, as planned).",
        minimum=1,
    )
    on_failure: OnFailure = option("recover", "If a machine fails: move its stages to the others, or raise an error.")
    standby: Natural = option(0, "So many machines only wait, with the stages loaded.", metavar="N", minimum=0)
    spares: bool = option(False, "Each stage is loaded a second time, where it would move to.")
    failure_timeout_seconds: Seconds | None = option(
        None, "Silence before a machine is asked.", flag="--failure-timeout", metavar="SECONDS", minimum=0.05
    )
    events: Path | None = option(None, "Append what happens to the deployment, as lines of JSON.", metavar="FILE")

    def __post_init__(self) -> None:
        fit_fields(self, InputError)
        if self.on_failure == "raise" and (self.standby or self.spares):
            raise InputError('machines on standby and spares take stages over: leave on_failure="raise" out')
