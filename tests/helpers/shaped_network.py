"""Workers in network namespaces, behind links whose bandwidth the kernel limits. Needs root and iproute2.

Each namespace is joined to a bridge, as machines are to a switch, and all its traffic passes a token bucket. The client
is outside, on the bridge. Unlike a `Relay` this takes little processor time, so that it works for gigabits, too.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rpc_runtime.wire.channels import WorkerEndpoint
from tests.helpers.rpc_runtime.worker_process import ready, start_worker

END_SECONDS = 20.0
SUBNET = f"10.213.{os.getpid() % 256}"
"""Different ones for processes that run at the same time."""
QUEUED = "50ms"
"""The longest time that data wait for the link; TCP fills this queue."""


@contextmanager
def shaped_workers(
    names: Sequence[str], bits_per_second: float, cache: Path
) -> Iterator[tuple[Mapping[str, WorkerEndpoint], Mapping[str, int]]]:
    """Yield the endpoints of workers of one core each, and their processes; at the end, remove them and the network.

    Raises:
        CalledProcessError: the network cannot be created; names the command.
    """
    with switch() as bridge, ExitStack() as until_end:
        workers = [
            until_end.enter_context(_worker(name, number, bridge, bits_per_second, cache / name))
            for number, name in enumerate(names)
        ]
        yield (
            {name: WorkerEndpoint(name, address) for name, (address, _) in zip(names, workers, strict=True)},
            {name: process for name, (_, process) in zip(names, workers, strict=True)},
        )


@contextmanager
def switch() -> Iterator[str]:
    """Yield the name of a bridge, which has an address of this host.

    Raises:
        CalledProcessError: the bridge cannot be created; names the command.
    """
    bridge = f"ts{os.getpid()}"
    with ExitStack() as until_end:
        _made(until_end, f"link add {bridge} type bridge", f"link del {bridge}")
        _ip(f"addr add {SUBNET}.1/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        yield bridge


@dataclass(frozen=True)
class Space:
    """A network namespace at a switch: ``within`` is the command that runs another one in it."""

    bridge: str
    name: str
    outer: str
    inner: str
    host: str

    @property
    def within(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def unplug(self) -> None:
        """Drop all packets in both directions; neither end notices."""
        _ip(f"link set {self.outer} nomaster")

    def plug(self) -> None:
        _ip(f"link set {self.outer} master {self.bridge}")


@contextmanager
def space_at(bridge: str, number: int) -> Iterator[Space]:
    """Yield a namespace that is joined to a `switch`. Raises as `switch`."""
    space = Space(bridge, f"{bridge}-{number}", f"{bridge}o{number}", f"{bridge}i{number}", f"{SUBNET}.{number + 2}")
    with ExitStack() as until_end:
        _made(until_end, f"netns add {space.name}", f"netns del {space.name}")
        join = f"link add {space.outer} type veth peer name {space.inner} netns {space.name}"
        _made(until_end, join, f"link del {space.outer}")
        space.plug()
        _ip(f"link set {space.outer} up")
        _ip(f"-n {space.name} addr add {space.host}/24 dev {space.inner}")
        _ip(f"-n {space.name} link set {space.inner} up")
        _ip(f"-n {space.name} link set lo up")
        yield space


@contextmanager
def _worker(name: str, number: int, bridge: str, bits_per_second: float, cache: Path) -> Iterator[tuple[str, int]]:
    with ExitStack() as until_end:
        space = until_end.enter_context(space_at(bridge, number))
        # One millisecond of data: with more, a tensor of some kilobytes would sometimes pass without limit.
        burst = max(10_000, int(bits_per_second / 8 / 1000))
        shape = f"root tbf rate {bits_per_second:.0f}bit burst {burst} latency {QUEUED}"
        _run(f"tc qdisc add dev {space.outer} {shape}")
        _run(f"{' '.join(space.within)} tc qdisc add dev {space.inner} {shape}")
        cores = sorted(os.sched_getaffinity(0))
        listen = f"--listen {space.host}:0 --insecure --threads 1 --cores {cores[number % len(cores)]}"
        arguments = (*listen.split(), "--name", name, "--json", "--exit-with-parent")
        process = until_end.enter_context(start_worker(cache, *arguments, within=space.within))
        try:
            yield ready(process), process.pid
        finally:
            try:
                process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _made(until_end: ExitStack, make: str, undo: str) -> None:
    _ip(make)
    until_end.callback(_undone, undo)


def _undone(command: str) -> None:
    with suppress(subprocess.CalledProcessError):  # an interface is removed with its namespace
        _ip(command)


def _ip(command: str) -> None:
    _run(f"ip {command}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
