"""Benchmark a deployment that outlives its machines: its pauses by fault, and what it costs while nothing fails.

Three workers have a stage each; the second one is hit in the middle of a stream. A pause is the longest time between
two results; ``recovery_seconds`` is the part of it after the failure was noticed. Throughput, and the cores that client
and workers use while idle, are compared with ``on_failure="raise"``. ``--set seconds=3``: of each stream.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise

import tvm_split
from rpc_runtime.client.deployment_event import DeploymentEvent
from scripts.cases.links import processor_seconds
from scripts.cases.observing import SMALL, model_of
from scripts.harness import Case, Ratio, Setup, Side
from scripts.processes import Figures, Prepared
from scripts.sides import arrivals, cluster_of, local_workers, rate
from tests.helpers.waiting import eventually

MACHINES = ("machine-a", "machine-b", "machine-c")
SETTLE_SECONDS = 1.0
"""Threads spin for a while after their work."""
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "terminated": signal.SIGTERM}


def _switches(deployment: tvm_split.Deployment) -> list[DeploymentEvent]:
    return [event for event in deployment.events if event.placement]


@contextmanager
def ways(name: str, seconds: float, names: Sequence[str]) -> Iterator[Prepared]:
    """Deploy on new workers for each measurement; a way is one of `FAULTS`, or a value of ``on_failure``."""
    model, inputs = model_of(name)
    arrays = [tensor.numpy() for tensor in inputs]
    planned = tvm_split.plan(model, tvm_split.Cluster.in_process(len(MACHINES), threads=1), stages=3, estimate=True)
    bundle = tvm_split.compile(model, planned, verify=False)

    def measure(way: str) -> Figures:
        with ExitStack() as until_end:
            workers = local_workers(MACHINES, until_end)
            deployment = until_end.enter_context(
                tvm_split.deploy(
                    bundle, cluster_of(workers.endpoints), on_failure="raise" if way == "raise" else "recover"
                )
            )
            warnings.simplefilter("ignore")  # of recoveries
            arrivals(deployment, arrays, 0.0)
            if way in FAULTS:
                threading.Timer(seconds / 2, os.kill, (workers.process_ids[MACHINES[1]], FAULTS[way])).start()
                pause = max(after - before for before, after in pairwise(arrivals(deployment, arrays, seconds)))
                eventually(lambda: _switches(deployment), "the stages have moved")  # results may come before the event
                event = _switches(deployment)[0]
                return {"pause_seconds": pause, "recovery_seconds": event.pause_seconds, "replayed": event.replayed}
            per_second = rate(arrivals(deployment, arrays, seconds))
            time.sleep(SETTLE_SECONDS)
            client = time.process_time()
            used = processor_seconds(lambda: time.sleep(seconds)) + time.process_time() - client
            return {"per_second": per_second, "idle_cores": used / seconds}

    yield Prepared(measure, {name: {} for name in names})


def sides(name: str, names: Sequence[str], setup: Setup) -> Sequence[Side]:
    return setup.sides(ways, name=name, names=names, seconds=float(setup.options.values.get("seconds", 3.0)))


CASE = Case(
    subjects={
        f"{what}, {name}": partial(sides, name, names)
        for what, names in (("pauses", (*FAULTS,)), ("costs", ("raise", "recover")))
        for name in (SMALL, "resnet50")
    },
    ratios=tuple(Ratio(key, "recover", "raise") for key in ("per_second", "idle_cores")),
)
