"""The faults that hit machines, and the phases of a deployment in which they do: two tables."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rpc_runtime.client.worker_client import WorkerClient
from tests.chaos.lab import CACHE_BYTES, Lab, Worker
from tests.helpers.relay import Relay
from tests.helpers.waiting import PATIENCE_SECONDS

SLOW_BYTES_PER_SECOND = 256 * 1024.0
"""The slowest supported link."""


@dataclass(frozen=True)
class Phase:
    """Faults come up to ``spread_seconds`` after the client has sent ``message``."""

    message: str
    spread_seconds: float


PHASES: Mapping[str, Phase] = {
    "deploying": Phase("opening", 0.25),
    "first input": Phase("opened", 0.02),
    "steady": Phase("result", 0.5),
    "recovering": Phase("event failure", 0.5),
    "draining": Phase("event draining", 0.3),
    "returned": Phase("event returned", 0.5),
    "closing": Phase("closing", 0.05),
}
"""By name. The client's events are messages as well, ``event`` and their kind."""
LAST = "closing"
"""The phase that begins when there were faults enough."""


@dataclass(frozen=True)
class Target:
    """What a fault hits: a worker, and the relay in front of it, if there is one."""

    worker: Worker
    relay: Relay | None = None


Act = Callable[[Target], None]


def _nothing(target: Target) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """``hit`` does it, ``undo`` ends it: after a time between ``seconds``, or at the end of the scenario.

    Args:
        loses: stages of this machine cannot go on there, not even for a moment, as on one that ends in good order.
        is_lost: the machine can hold no stages until the scenario is over.
        ends: the worker's process ends.
        needs: whether this lab can do it; the reason, if it cannot.
        at_switch: workers are at a switch.
        has_relay: a relay is in front of the machine.
        prepare: called before the client begins.
    """

    hit: Act
    undo: Act = _nothing
    seconds: tuple[float, float] | None = None
    loses: bool = True
    is_lost: bool = True
    ends: bool = False
    needs: Callable[[Lab], str] = field(default=lambda lab: "")
    at_switch: bool = False
    has_relay: bool = False
    prepare: Act = _nothing


def _signal(number: int) -> Act:
    return lambda target: target.worker.signal(number)


def _restart(target: Target) -> None:
    target.worker.end()
    target.worker.start()


def _drain(drains: bool) -> Act:
    def on(target: Target) -> None:
        with contextlib.closing(WorkerClient(target.worker.endpoint)) as caller:
            caller.drain(drains, PATIENCE_SECONDS)

    return on


def _relay(act: Callable[[Relay], None]) -> Act:
    def on(target: Target) -> None:
        assert target.relay is not None
        act(target.relay)

    return on


def _unplug(target: Target) -> None:
    assert target.worker.space is not None
    target.worker.space.unplug()


def _plug(target: Target) -> None:
    assert target.worker.space is not None
    target.worker.space.plug()


def _filler(target: Target) -> Path:
    return target.worker.cache / "filler"


def _fill(target: Target) -> None:
    with _filler(target).open("wb", buffering=0) as file:
        try:
            for size in (CACHE_BYTES, 1 << 16, 1 << 12, 1):
                while file.write(bytes(size)) == size:
                    pass
        except OSError:
            pass


def _no_switch(lab: Lab) -> str:
    return "" if lab.bridge else "there are no network namespaces here (root and iproute2 make them)"


def _no_disk(lab: Lab) -> str:
    return "" if lab.has_disks else "no disk can be mounted here (root can)"


FAULTS: Mapping[str, Fault] = {
    "killed": Fault(_signal(signal.SIGKILL), ends=True),
    "stopped": Fault(_signal(signal.SIGSTOP), _signal(signal.SIGCONT)),
    "paused": Fault(_signal(signal.SIGSTOP), _signal(signal.SIGCONT), seconds=(0.5, 6.0), loses=False, is_lost=False),
    "terminated": Fault(_signal(signal.SIGTERM), loses=False, ends=True),
    "drained": Fault(_drain(True), _drain(False), loses=False),
    "restarted": Fault(_restart, is_lost=False),
    "packets dropped": Fault(_unplug, _plug, needs=_no_switch, at_switch=True),
    "link frozen": Fault(_relay(Relay.freeze), _relay(Relay.thaw), has_relay=True),
    "link slow": Fault(
        _relay(lambda relay: relay.limit(SLOW_BYTES_PER_SECOND)), loses=False, is_lost=False, has_relay=True
    ),
    "disk full": Fault(
        _fill,
        lambda target: _filler(target).unlink(missing_ok=True),
        loses=False,
        needs=_no_disk,
        prepare=lambda target: target.worker.empty_cache(),
    ),
}
"""By name, as they are shown."""
CLIENT_KILLED = "client killed"
