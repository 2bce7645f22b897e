"""CPU features from /proc/cpuinfo, processes that can share memory, and limits of control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rpc_runtime.hardware import (
    DISABLED_FEATURES_VARIABLE,
    HostCores,
    MemoryLimit,
    core_quota,
    features_in,
    memory_domain,
    memory_limits,
    usable_together,
)
from tests.helpers.recorded_processors import recorded


def test_features_are_those_that_all_processors_have() -> None:
    text = "processor\t: 0\nflags\t\t: fpu sse avx2\n\nprocessor\t: 1\nflags\t\t: fpu sse\nbugs\t\t: avx2\n"
    assert features_in(text, "x86_64") == {"fpu", "sse"}


@pytest.mark.parametrize(
    ("name", "architecture"), [("apple-m1-docker-desktop", "x86_64"), ("haswell-e5-2680v3-bare-metal", "aarch64")]
)
def test_an_emulator_that_shows_its_hosts_processor(name: str, architecture: str) -> None:
    _, text = recorded(name)
    assert features_in(text, architecture) == frozenset()


def test_memory_is_shared_by_processes_of_one_network_namespace_and_user() -> None:
    code = "from rpc_runtime.hardware import memory_domain; print(memory_domain())"
    processes = {
        name: subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True, check=False)
        for name, before in (
            ("here", []),
            ("namespace", ["unshare", "--net"]),
            ("user", ["setpriv", "--reuid=65534"]),
            ("users", ["unshare", "--user"]),
        )
    }
    assert processes["here"].stdout.strip() == memory_domain() != ""
    for name in ("namespace", "user", "users"):
        if processes[name].returncode:
            pytest.skip(f"this system gives no second {name}: {processes[name].stderr}")
        assert processes[name].stdout.strip() not in ("", memory_domain())


@pytest.mark.parametrize("names", ["avx512f,amx_tile", "avx512q", "aes", "fpu"])
def test_instruction_sets_whose_hiding_has_no_effect_are_refused(names: str) -> None:
    code = "from rpc_runtime.hardware import cpu_features; cpu_features()"
    environment = {**os.environ, DISABLED_FEATURES_VARIABLE: names}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert f"{DISABLED_FEATURES_VARIABLE} names {names}, which no kernel uses" in ended.stderr


ROOT = "sys/fs/cgroup"
NO_LIMIT_1 = "9223372036854771712"
Files = dict[str, str]


def root_with(folder: Path, groups: str, files: Files) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


def version_1(group: str, quota: str) -> Files:
    folder = f"{ROOT}/cpu,cpuacct{group}"
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}


NESTED = {
    f"{ROOT}/cpu.max": "max 100000",
    f"{ROOT}/user.slice/cpu.max": "150000 100000",
    f"{ROOT}/user.slice/job/cpu.max": "400000 100000",
    f"{ROOT}/user.slice/other/cpu.max": "10000 100000",
}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("0::/", {f"{ROOT}/cpu.max": "200000 100000"}, 2.0, id="a container"),
        pytest.param("0::/", {f"{ROOT}/cpu.max": "max 100000"}, None, id="no limit"),
        pytest.param("0::/user.slice/job", NESTED, 1.5, id="parent and sibling have smaller quotas"),
        pytest.param(
            "4:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc",
            version_1("/docker/abc", "300000") | version_1("", "-1"),
            3.0,
            id="version 1",
        ),
        pytest.param("4:cpu,cpuacct:/docker/abc", version_1("", "250000"), 2.5, id="its host's path"),
        pytest.param("4:cpu,cpuacct:/\n0::/", version_1("", "-1"), None, id="both versions"),
        pytest.param("", {}, None, id="no control groups"),
        pytest.param("0::/", {f"{ROOT}/cpu.max": "nonsense"}, None, id="nonsense"),
    ],
)
def test_core_quotas(tmp_path: Path, groups: str, files: Files, expected: float | None) -> None:
    assert core_quota(root_with(tmp_path, groups, files))[0] == (expected or 0.0)


def test_memory_limits(tmp_path: Path) -> None:
    files = {
        f"{ROOT}/a/b/memory.max": "max",
        f"{ROOT}/a/memory.max": "4000",
        f"{ROOT}/a/memory.current": "3000",
        f"{ROOT}/a/memory.stat": "anon 1000\ninactive_file 1500\nactive_file 500",
    }
    assert memory_limits(root_with(tmp_path / "2", "0::/a/b", files)) == [MemoryLimit(4000, 1500)]
    files = {
        f"{ROOT}/memory/docker/abc/memory.limit_in_bytes": "8000",
        f"{ROOT}/memory/docker/abc/memory.usage_in_bytes": "5000",
        f"{ROOT}/memory/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 2000",
        f"{ROOT}/memory/memory.limit_in_bytes": NO_LIMIT_1,
        f"{ROOT}/memory/memory.usage_in_bytes": "100",
    }
    limits = memory_limits(root_with(tmp_path / "1", "5:memory:/docker/abc", files))
    assert limits == [MemoryLimit(8000, 3000), MemoryLimit(int(NO_LIMIT_1), 100)]


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
