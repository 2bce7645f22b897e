"""What the machine under this process is, as the operating system says."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def mcpu(architecture: str, features: frozenset[str]) -> str:
    """LLVM's name for the processor: on x86-64 the highest level of the psABI whose features are all there."""
    if architecture != "x86_64":
        return "generic"
    level = "x86-64"
    for name, needed in (("x86-64-v2", _V2), ("x86-64-v3", _V3), ("x86-64-v4", _V4)):
        if not needed <= features:
            return level
        level = name
    return level


@cache
def cpu_features() -> frozenset[str]:
    """The features that Linux reports for the processor; empty where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _memory_line(name: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _control_group_bytes() -> int:
    """The limit of the container that the worker runs in, in bytes; 0 for none."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        return int(text) if text.isdigit() else 0
    except OSError:
        return 0


def total_memory_bytes() -> int:
    total, limit = _memory_line("MemTotal"), _control_group_bytes()
    return min(total, limit) if limit else total


def available_memory_bytes() -> int:
    """What programs may still take, in bytes; 0 when the system does not say."""
    free, limit = _memory_line("MemAvailable"), _control_group_bytes()
    if not limit:
        return free
    try:
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        statistics = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="utf-8").splitlines()
        counts = dict(line.split(maxsplit=1) for line in statistics)
        used -= int(counts.get("inactive_file", 0))  # the page cache gives way
    except (OSError, ValueError):
        return min(free, limit)
    return max(0, min(free, limit - used))


def core_numbers() -> tuple[int, ...]:
    """The cores that this process may run on, by the operating system's numbers."""
    return tuple(sorted(os.sched_getaffinity(0)))


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
