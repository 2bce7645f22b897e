"""What the machine under this process is, as the operating system says."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rpc_runtime.control_groups import core_quota, memory_limits

DISABLED_FEATURES_VARIABLE = "TVM_SPLIT_DISABLE_CPU_FEATURES"
"""Environment variable: instruction sets, by Linux's names and separated by spaces, that this host must not use."""

_FEATURES_KEYS = {"x86_64": "flags", "amd64": "flags", "i686": "flags"}
"""By architecture, the key of /proc/cpuinfo that lists instruction sets; ``Features`` for the others, which are ARM's.

An emulator for one program shows the host's file: there the key of the emulated architecture is missing.
"""


@cache
def cpu_features() -> frozenset[str]:
    """Linux's names of the instruction sets that this host can execute.

    Empty where there is no /proc/cpuinfo, or where it describes another architecture.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    return features_in(text, platform.machine()) - frozenset(os.environ.get(DISABLED_FEATURES_VARIABLE, "").split())


def features_in(cpuinfo: str, architecture: str) -> frozenset[str]:
    """The instruction sets that all processors in the text of a /proc/cpuinfo have.

    ``architecture`` is what ``platform.machine()`` returns there.
    """
    wanted = _FEATURES_KEYS.get(architecture, "Features")
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    processors = [frozenset(value.split()) for key, _, value in lines if key.strip() == wanted]
    return frozenset.intersection(*processors) if processors else frozenset()


def _memory_line(name: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def total_memory_bytes() -> int:
    """The memory that this process's control groups allow it, at most the host's; 0 when the system does not say."""
    return min([_memory_line("MemTotal"), *(limit.limit_bytes for limit in memory_limits())])


def available_memory_bytes() -> int:
    """What programs may still take, in bytes; 0 when the system does not say."""
    left = (max(0, limit.limit_bytes - limit.used_bytes) for limit in memory_limits())
    return min([_memory_line("MemAvailable"), *left])


@dataclass(frozen=True)
class HostCores:
    """The processor cores that a process may use.

    ``numbers`` are the operating system's, of the cores in the process's affinity mask. ``quota`` is the processor time
    that its control group may use, in seconds per second (0: no limit), and ``quota_group`` identifies the processes
    that share it. ``host`` is the identity of the host's boot, empty where it is not known.
    """

    host: str
    numbers: tuple[int, ...]
    quota: float = 0.0
    quota_group: str = ""

    @property
    def count(self) -> int:
        """How many threads can compute at the same time."""
        return usable_together([self])

    @property
    def text(self) -> str:
        """For messages: ``2 cores``, or ``2 cores (a quota of 2.5 on 64 cores)``."""
        count = "1 core" if self.count == 1 else f"{self.count} cores"
        return f"{count} (a quota of {self.quota:g} on {len(self.numbers)})" if self.quota else count


def own_cores() -> HostCores:
    """The cores that this process may use."""
    quota = core_quota()
    limits = (0.0, "") if quota is None else (quota.cores, quota.group)
    return HostCores(boot_id(), tuple(sorted(os.sched_getaffinity(0))), *limits)


def usable_together(cores: Iterable[HostCores]) -> int:
    """How many cores processes of one host can keep busy at the same time; 0 if their numbers are not known.

    A quota is rounded down, to no less than 1. Threads beyond the quota use it up early, and then all threads of the
    group stop until the period ends.
    """
    processes = list(cores)
    count = len({number for process in processes for number in process.numbers})
    if not count or not all(process.quota for process in processes):
        return count
    quotas = {process.quota_group: process.quota for process in processes}
    return min(count, max(1, math.floor(math.fsum(quotas.values()))))


ALL_USERS = 2**32 - 1
"""That many are mapped where no namespace has fewer users than the host."""


@cache
def memory_domain() -> str:
    """What processes have in common that can share memory: a kernel, a network namespace, in which their sockets'
    names are, and a user. Empty where it is not said."""
    try:
        namespace, user = Path("/proc/self/ns/net").readlink(), _user_outside()
    except (OSError, ValueError):
        return ""
    return f"{boot_id()} {namespace} {user}" if boot_id() and user is not None else ""


def _user_outside() -> int | None:
    """This process's user by the number that the user namespace around its own knows; that is the host's, as a rule.

    None where the kernel shows strangers as this very user, as it does with all that a namespace does not map.
    """
    own, strangers = os.geteuid(), int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
    maps_all = any(count == ALL_USERS for _, _, count in mapped)
    if own == strangers and not maps_all:
        return None
    return next((outside + own - first for first, outside, count in mapped if first <= own < first + count), None)


@cache
def boot_id() -> str:
    """Differs for every start of an operating system; its containers share it. Empty where it is not said."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
