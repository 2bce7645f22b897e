"""The options of a worker's command line for TVM's RPC tracker, and their validation."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rpc_runtime.errors import InputError
from rpc_runtime.wire.security import LOOPBACK_OF, is_loopback, split_address
from rpc_runtime.wire.tracker import TrackerAddress, require_key
from rpc_runtime.worker.tracker_registration import RegistrationPlan


@dataclass(frozen=True)
class TrackerOptions:
    """Where a worker registers, and whether kernels may be tuned there by TVM's RPC, which has no authentication.

    ``advertise`` is the host by which others reach this machine. The default is the host on which the worker listens,
    or, if it listens on all addresses, the host from which it calls the tracker.
    """

    tracker: TrackerAddress
    key: str
    advertise: str | None = None
    tuning: bool = False
    tuning_port: int = 0

    def plan(self, listen: str) -> RegistrationPlan:
        """Return how a worker that listens on ``listen`` (HOST:PORT) registers.

        Raises:
            InputError: clients of the tracker could not reach the worker.
        """
        host = split_address(listen)[0]
        if self.advertise is None and is_loopback(host) and not is_loopback(self.tracker.host):
            raise InputError(
                f"the tracker {self.tracker} is on another machine, and whoever asks it cannot reach {listen}: listen "
                "on an address of the network, or give --advertise with the host by which others reach this worker"
            )
        return RegistrationPlan(
            self.tracker, self.key, self.advertise or (None if host in LOOPBACK_OF else host.strip("[]"))
        )


def add_tracker_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TVM's RPC tracker")
    group.add_argument("--tracker", metavar="HOST:PORT", help="register this machine there, under --key")
    group.add_argument("--key", help="the kind of machine, as `tvm.exec.rpc_server --key` has it")
    group.add_argument("--advertise", metavar="HOST", help="the host by which others reach this machine")
    group.add_argument(
        "--insecure-tuning",
        action="store_true",
        help="let kernels be tuned here through the tracker also where the worker itself knows its callers: TVM's RPC "
        "knows none, so whoever reaches its port runs code here",
    )
    group.add_argument(
        "--tuning-port", type=int, metavar="PORT", help="where TVM's RPC is served, with --insecure… (default: any)"
    )


def tracker_options(given: argparse.Namespace) -> TrackerOptions | None:
    """Return the given tracker options; None without a tracker.

    Raises:
        InputError: options contradict each other.
    """
    if given.tracker is None:
        for name in ("key", "advertise", "insecure_tuning", "tuning_port"):
            if getattr(given, name):
                raise InputError(f"--{name.replace('_', '-')} belongs to --tracker")
        return None
    if given.key is None:
        raise InputError("--tracker needs --key as well, under which this machine is listed")
    tuning = given.insecure or given.insecure_tuning
    if given.tuning_port is not None and not tuning:
        raise InputError(
            "TVM's RPC knows no callers, so a worker that does is not tuned on: give --insecure-tuning with "
            "--tuning-port, on a network where you trust everyone, or leave it out"
        )
    if given.tuning_port is not None and not 0 <= given.tuning_port < 1 << 16:
        raise InputError(f"--tuning-port is a port from 0 to 65535, got {given.tuning_port}")
    tracker, key = TrackerAddress.parse(given.tracker), require_key(given.key)
    return TrackerOptions(tracker, key, given.advertise, tuning, given.tuning_port or 0)
