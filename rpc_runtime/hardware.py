"""Processor, memory and identity of this host, and the limits of this process, as the operating system reports them.

Linux's control groups may limit processor time and memory of the process's own group or of any group around it. Both
versions of the interface are read: 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html) and 1, whose controllers have
hierarchies of their own.
"""

import math
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rpc_runtime.errors import InputError

DISABLED_FEATURES_VARIABLE = "TVM_SPLIT_DISABLE_CPU_FEATURES"
"""Environment variable: instruction sets, by Linux's names and separated by spaces, that this host must not use."""
_NAMES = {
    "x86_64": "cmov mmx sse sse2 sse3=pni ssse3 sse4.1=sse4_1 sse4.2=sse4_2 sse4a popcnt avx avx2 f16c fma fma4 xop "
    "tbm bmi=bmi1 bmi2 movbe adx cx16 gfni vaes vpclmulqdq lzcnt=abm sahf=lahf_lm pclmul=pclmulqdq avx512f avx512cd "
    "avx512dq avx512bw avx512vl avx512er avx512pf avx512ifma avx512vbmi avx512vnni=avx512_vnni avx512bf16=avx512_bf16 "
    "avx512fp16=avx512_fp16 avx512vbmi2=avx512_vbmi2 avx512bitalg=avx512_bitalg avx512vpopcntdq=avx512_vpopcntdq "
    "avx512vp2intersect=avx512_vp2intersect avxvnni=avx_vnni avxvnniint8=avx_vnni_int8 avxvnniint16=avx_vnni_int16 "
    "avxifma=avx_ifma avxneconvert=avx_ne_convert amx-tile=amx_tile amx-int8=amx_int8 amx-bf16=amx_bf16 "
    "amx-fp16=amx_fp16",
    "aarch64": "fp-armv8=fp neon=asimd fullfp16=asimdhp fp16fml=asimdfhm dotprod=asimddp rdm=asimdrdm complxnum=fcma "
    "jsconv=jscvt lse=atomics crc=crc32 bf16 i8mm sve sve2 sme sme2",
    "arm": "neon vfp3=vfpv3 vfp4=vfpv4 hwdiv-arm=idiva hwdiv=idivt",
}
"""Instruction sets for arithmetic, by architecture: LLVM's name, and after "=" the name in /proc/cpuinfo."""
LINUX_NAMES = {
    family: {llvm: linux or llvm for llvm, _, linux in (name.partition("=") for name in names.split())}
    for family, names in _NAMES.items()
}
"""By architecture, LLVM's names of instruction sets that kernels use, with their names in /proc/cpuinfo."""
_USED_FEATURES = frozenset(linux for names in LINUX_NAMES.values() for linux in names.values())

_FEATURES_KEYS = {"x86_64": "flags", "amd64": "flags", "i686": "flags"}
"""The key of /proc/cpuinfo that lists instruction sets, by architecture; ARM's ``Features`` is the default.

Under user-mode emulation the file is the host's, so it lacks the key of the emulated architecture.
"""


@cache
def cpu_features() -> frozenset[str]:
    """Return Linux's names of the instruction sets that this host can execute, without the disabled ones.

    See `DISABLED_FEATURES_VARIABLE`. Empty if there is no /proc/cpuinfo, or if it describes another architecture.

    Raises:
        InputError: the variable names what no kernel uses: hiding it would have no effect.
    """
    features = features_in(_read(Path("/proc/cpuinfo")), platform.machine())
    disabled = frozenset(os.environ.get(DISABLED_FEATURES_VARIABLE, "").split())
    if unused := disabled - _USED_FEATURES:
        raise InputError(
            f"{DISABLED_FEATURES_VARIABLE} names {', '.join(sorted(unused))}, which no kernel uses; give names of "
            "/proc/cpuinfo, such as avx2 and avx512f, with spaces between them"
        )
    return features - disabled


def features_in(cpuinfo: str, architecture: str) -> frozenset[str]:
    """Return the instruction sets that all processors in the text of a /proc/cpuinfo have.

    ``architecture`` is what ``platform.machine()`` returns there.
    """
    features_key = _FEATURES_KEYS.get(architecture, "Features")
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    processors = [frozenset(value.split()) for key, _, value in lines if key.strip() == features_key]
    return frozenset.intersection(*processors) if processors else frozenset()


def _memory_line(name: str) -> int:
    line = re.search(rf"^{name}: *(\d+)", _read(Path("/proc/meminfo")), re.MULTILINE)
    return 0 if line is None else int(line[1]) * 1024


def total_memory_bytes() -> int:
    """Return the smallest of the host's memory and the control groups' limits, in bytes; 0 if not known."""
    return min([_memory_line("MemTotal"), *(limit.limit_bytes for limit in memory_limits())])


def available_memory_bytes() -> int:
    """Return how many more bytes this process may allocate; 0 if not known."""
    free_bytes = (max(0, limit.limit_bytes - limit.used_bytes) for limit in memory_limits())
    return min([_memory_line("MemAvailable"), *free_bytes])


@dataclass(frozen=True)
class HostCores:
    """The processor cores that a process may use.

    ``numbers`` are the operating system's numbers of the cores in the process's affinity mask. ``quota`` is the CPU
    time that its control group may use, in seconds per second (0: no limit); processes with equal ``quota_group`` share
    it. ``host`` is the host's `boot_id`, empty if it is not known.
    """

    host: str
    numbers: tuple[int, ...]
    quota: float = 0.0
    quota_group: str = ""

    @property
    def count(self) -> int:
        """The number of threads that can compute at the same time."""
        return usable_together([self])

    @property
    def text(self) -> str:
        """The number of cores for messages: ``2 cores``, or ``2 cores (a quota of 2.5 on 64)``."""
        count = "1 core" if self.count == 1 else f"{self.count} cores"
        return f"{count} (a quota of {self.quota:g} on {len(self.numbers)})" if self.quota else count


def own_cores() -> HostCores:
    """Return the cores that this process may use."""
    return HostCores(boot_id(), tuple(sorted(os.sched_getaffinity(0))), *core_quota())


def usable_together(cores: Iterable[HostCores]) -> int:
    """Return how many cores processes of one host can keep busy together; 0 if their core numbers are not known.

    A quota is rounded down, to no less than 1. Threads beyond the quota use it up early, and then all threads of the
    group stop until the period ends. Quotas of different groups are added, so a group around them may allow less.
    """
    processes = list(cores)
    count = len({number for process in processes for number in process.numbers})
    if not count or not all(process.quota for process in processes):
        return count
    quotas = {process.quota_group: process.quota for process in processes}
    return min(count, max(1, math.floor(math.fsum(quotas.values()))))


@cache
def load_per_core() -> float:
    """Return how many processes of the host computed or waited to in the last minute, on average, for each core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def memory_domain() -> str:
    """Return an identifier of the processes that can share memory with this one; empty if it is not known.

    They have the same kernel, network namespace (for the names of sockets), user namespace and user.
    """
    try:
        network, users = (Path(f"/proc/self/ns/{name}").readlink() for name in ("net", "user"))
    except OSError:
        return ""
    return f"{boot_id()} {network} {users} {os.geteuid()}" if boot_id() else ""


@cache
def boot_id() -> str:
    """Return the boot id of the host's kernel, the same in all its containers; empty if it is not known."""
    return _read(Path("/proc/sys/kernel/random/boot_id"))


ROOT = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """A control group's memory limit and use; reclaimable page cache (``inactive_file``) does not count as used."""

    limit_bytes: int
    used_bytes: int


def core_quota(root: Path = ROOT) -> tuple[float, str]:
    """Return the smallest CPU quota that applies to this process, and the control group that has it; (0, "") if none.

    The quota is what all processes of that group may use together, in cores (seconds per second).

    Args:
        root: the folder in which ``proc`` and the control groups are mounted.
    """
    quotas = [quota for folder in _groups("cpu", root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=(0.0, ""))


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return the memory limits of all groups around this process that have one, the innermost first."""
    limits = (_memory_limit_of(folder) for folder in _groups("memory", root))
    return [limit for limit in limits if limit is not None]


def _quota_of(folder: Path) -> tuple[float, str] | None:
    version_1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    quota, _, period = (_read(folder / "cpu.max") or version_1).partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # "max" in version 2 and -1 in version 1: no limit
    status = folder.stat()
    return int(quota) / int(period), f"{status.st_dev}:{status.st_ino}"


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
    """Yield the folders of this process's control groups that may limit a controller, from the innermost outward.

    Version 2 is mounted at the usual place, or beside version 1; version 1 has a folder for each controller. A
    container's path may be that of its host, although only the container's own group is mounted here.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for top in (mounted / controller, mounted / names) if names else (mounted / "unified", mounted):
            folder = top / path.strip("/")
            if top.is_dir():
                yield from (
                    group for group in (folder, *folder.parents) if group.is_dir() and group.is_relative_to(top)
                )
                break


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
