"""The limits of processor time and memory that Linux's control groups set for this process.

A limit may be set on the process's own group or on any group around it, in version 2 of the interface
(https://docs.kernel.org/admin-guide/cgroup-v2.html) or in version 1, whose controllers have hierarchies of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class CoreQuota:
    """The processor time that all processes of a control group may use together, in cores (seconds per second).

    Two processes of one host share a quota if their ``group`` is equal.
    """

    cores: float
    group: str


@dataclass(frozen=True)
class MemoryLimit:
    """A control group's memory limit and use; reclaimable page cache (``inactive_file``) does not count as used."""

    limit_bytes: int
    used_bytes: int


def core_quota(root: Path = ROOT) -> CoreQuota | None:
    """Return the smallest CPU quota that applies to this process; None if there is none.

    Args:
        root: the folder in which ``proc`` and the control groups are mounted.
    """
    quotas = [quota for folder in _groups("cpu", root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, key=lambda quota: quota.cores, default=None)


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return the memory limits of all groups around this process that have one, the innermost first."""
    limits = (_memory_limit_of(folder) for folder in _groups("memory", root))
    return [limit for limit in limits if limit is not None]


def _quota_of(folder: Path) -> CoreQuota | None:
    version_1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    quota, _, period = (_read(folder / "cpu.max") or version_1).partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # "max" in version 2 and -1 in version 1: no limit
    status = folder.stat()
    return CoreQuota(int(quota) / int(period), f"{status.st_dev}:{status.st_ino}")


def _memory_limit_of(folder: Path) -> MemoryLimit | None:
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    if not limit.isdigit():
        return None
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    counts = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    # In version 1, only the "total_" entries include the groups inside.
    page_cache = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
    used_bytes = int(used) - int(page_cache) if used.isdigit() and page_cache.isdigit() else 0
    return MemoryLimit(int(limit), max(0, used_bytes))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may limit a controller, from the innermost outward."""
    paths: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    for mount, mounted_group, controllers in _mounts(root):
        path = paths.get("" if controllers is None else controller, "")
        if path and (controllers is None or controller in controllers):
            top = root / mount.strip("/")
            # The path may be the host's, although only the container's own group is mounted here.
            folder = top / path.removeprefix(mounted_group).strip("/")
            yield from (group for group in (folder, *folder.parents) if group.is_dir() and group.is_relative_to(top))


def _mounts(root: Path) -> Iterator[tuple[str, str, list[str] | None]]:
    """Yield each mount point of control groups, the group mounted there, and its controllers (None in version 2).

    See proc_pid_mountinfo(5).
    """
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, *_, options = rest.split() or [""]
        if kind in ("cgroup", "cgroup2"):
            mounted_group, mount = (_unescaped(field) for field in fields.split()[3:5])
            yield mount, mounted_group, None if kind == "cgroup2" else options.split(",")


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
