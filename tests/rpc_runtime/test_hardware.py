"""The features that /proc/cpuinfo lists, and who can share memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rpc_runtime.hardware import DISABLED_FEATURES_VARIABLE, cpu_features, features_in, memory_domain
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


def test_this_machine_has_features() -> None:
    assert cpu_features()


def test_memory_is_shared_by_processes_of_one_network_namespace_and_user() -> None:
    code = "from rpc_runtime.hardware import memory_domain; print(memory_domain())"
    told = {
        name: subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True, check=False)
        for name, before in (("here", []), ("namespace", ["unshare", "--net"]), ("user", ["setpriv", "--reuid=65534"]))
    }
    assert told["here"].stdout.strip() == memory_domain() != ""
    for name in ("namespace", "user"):
        if told[name].returncode:
            pytest.skip(f"no other {name} can be had here: {told[name].stderr}")
        assert told[name].stdout.strip() not in ("", memory_domain())


@pytest.mark.parametrize(("option", "is_same"), [("--map-user=1000", True), ("--map-current-user", True), ("", False)])
def test_a_user_is_who_it_is_outside_of_its_namespace(option: str, is_same: bool) -> None:
    """One that its namespace does not map looks to it like all strangers do, so that it shares with nobody."""
    code = "from rpc_runtime.hardware import memory_domain; print(memory_domain())"
    command = ["unshare", "--user", *filter(None, [option]), sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip(f"no namespace of users can be had here: {told.stderr}")
    assert told.stdout.strip() == (memory_domain() if is_same else "")


@pytest.mark.parametrize("names", ["avx512f,amx_tile", "avx512q"])
def test_disabled_instruction_sets_that_there_are_not_are_refused(names: str) -> None:
    code = "from rpc_runtime.hardware import cpu_features; cpu_features()"
    environment = {**os.environ, DISABLED_FEATURES_VARIABLE: names}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert f"{DISABLED_FEATURES_VARIABLE} names {names}, which is no instruction set here" in ended.stderr
