"""Quotas and memory limits in both versions of control groups, read from made-up and from real folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.worker_client import describe
from rpc_runtime.control_groups import MemoryLimit, core_quota, memory_limits
from rpc_runtime.hardware import HostCores, usable_together
from tests.helpers.waiting import PATIENCE_SECONDS

VERSION_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
VERSION_1 = (
    "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
)
NO_LIMIT_1 = "9223372036854771712"
Files = dict[str, str]


def root_with(folder: Path, groups: str, mounts: str, files: Files) -> Path:
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"),
    [
        pytest.param("0::/", VERSION_2, {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0, id="a container"),
        pytest.param("0::/", VERSION_2, {"sys/fs/cgroup/cpu.max": "max 100000"}, None, id="no limit"),
        pytest.param(
            "0::/user.slice/job",
            VERSION_2,
            {
                "sys/fs/cgroup/cpu.max": "max 100000",
                "sys/fs/cgroup/user.slice/cpu.max": "150000 100000",
                "sys/fs/cgroup/user.slice/job/cpu.max": "400000 100000",
                "sys/fs/cgroup/user.slice/other/cpu.max": "10000 100000",
            },
            1.5,
            id="the parent group has a smaller quota, and so has a sibling",
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc",
            VERSION_1,
            {
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3.0,
            id="version 1",
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/abc",
            VERSION_1.replace("0:27 / ", "0:27 /docker/abc "),
            {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.5,
            id="version 1, a container that sees its host's path",
        ),
        pytest.param(
            "4:cpu:/\n0::/",
            f"{VERSION_1}\n33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
            {"sys/fs/cgroup/unified/cgroup.procs": "", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1"},
            None,
            id="both versions",
        ),
        pytest.param(
            "0::/",
            VERSION_2.replace("/sys/fs/cgroup", "/mnt/control\\040groups"),
            {"mnt/control groups/cpu.max": "100000 50000"},
            2.0,
            id="mounted elsewhere",
        ),
        pytest.param("", "", {}, None, id="no control groups"),
        pytest.param("0::/", VERSION_2, {"sys/fs/cgroup/cpu.max": "nonsense"}, None, id="nonsense"),
    ],
)
def test_core_quotas(tmp_path: Path, groups: str, mounts: str, files: Files, expected: float | None) -> None:
    found = core_quota(root_with(tmp_path, groups, mounts, files))
    assert (None if found is None else found.cores) == expected


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"),
    [
        pytest.param(
            "0::/a/b",
            VERSION_2,
            {
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": "4000",
                "sys/fs/cgroup/a/memory.current": "3000",
                "sys/fs/cgroup/a/memory.stat": "anon 1000\ninactive_file 1500\nactive_file 500",
            },
            [MemoryLimit(4000, 1500)],
            id="version 2",
        ),
        pytest.param(
            "5:memory:/docker/abc",
            VERSION_1,
            {
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "8000",
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "5000",
                "sys/fs/cgroup/memory/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 2000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_1,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "100",
            },
            [MemoryLimit(8000, 3000), MemoryLimit(int(NO_LIMIT_1), 100)],
            id="version 1",
        ),
    ],
)
def test_memory_limits(tmp_path: Path, groups: str, mounts: str, files: Files, expected: list[MemoryLimit]) -> None:
    assert memory_limits(root_with(tmp_path, groups, mounts, files)) == expected


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([HostCores("h", (0, 1, 2))], 3),
        ([HostCores("h", tuple(range(64)), 2.0, "g")], 2),
        ([HostCores("h", (0, 1), 64.0, "g")], 2),
        ([HostCores("h", (0, 1), 0.5, "g")], 1),
        ([HostCores("h", (0, 1, 2, 3), 2.7, "g")], 2),
        ([HostCores("h", (0,), 2.0, "g"), HostCores("h", (1,), 2.0, "g"), HostCores("h", (2,), 2.0, "g")], 2),
        ([HostCores("h", tuple(range(64)), 2.0, "g"), HostCores("h", tuple(range(64)), 3.0, "other")], 5),
        ([HostCores("h", (0, 1, 2, 3), 2.0, "g"), HostCores("h", (0, 1, 2, 3))], 4),
        ([], 0),
    ],
)
def test_cores_that_processes_can_keep_busy(cores: list[HostCores], expected: int) -> None:
    assert usable_together(cores) == expected


HALF = {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"}


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """The ``cgroup.procs`` of a control group with half a core."""
    if os.geteuid():
        pytest.skip("only root makes control groups")
    for parent in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"):
        group = Path(parent) / f"tvm-split-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            limits = [group / name for name in HALF if (group / name).exists()]
            if limits:
                limits[0].write_text(HALF[limits[0].name])
                yield group / "cgroup.procs"
                return
        finally:
            group.rmdir()
    pytest.skip("no control group for processor time can be made here")


def test_a_worker_in_a_group_says_its_quota(half_a_core: Path) -> None:
    with LocalWorkers(("box",)) as workers:
        free = describe(workers.endpoints["box"], PATIENCE_SECONDS)
        assert free.core_quota == 0
        half_a_core.write_text(str(workers.process_ids["box"]))
        limited = describe(workers.endpoints["box"], PATIENCE_SECONDS)
        assert (limited.cores, limited.core_quota) == (1, 0.5)
        assert limited.quota_group != free.quota_group
