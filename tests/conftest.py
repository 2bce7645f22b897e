"""Settings of all tests: equal examples in every run, an own cache folder, no measured times, working Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

import tvm_split
from rpc_runtime.files import CACHE_VARIABLE
from tests.helpers.rpc_runtime.worker_process import STATE_VARIABLE

# Examples are equal in every run: otherwise an old fault fails the next change, whatever it is about.
# `make test-more MARKS=hypothesis` draws new ones. Without a deadline, since an example's time depends on the load.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A thread of TVM's pools that has nothing to do yields 300,000 times before it sleeps or ends. What a test leaves so
# takes the cores of those behind it: on a busy machine for minutes, by the dozen.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "property tests try so many times their examples, drawn anew in each run"
    parser.addoption("--examples-times", type=int, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--examples-times") is None:
        # Hypothesis also draws constants that it finds in the project's modules, but only in those that are loaded at
        # that moment: examples would depend on which tests ran before in the same process. It has no setting for this.
        providers.is_local_module_file = lambda _: False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    times = config.getoption("--examples-times")
    tests = {item.obj for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)}
    for test in tests if times else ():
        # Hypothesis has no public way to change the settings of a test from outside.
        current = test._hypothesis_internal_use_settings
        more = settings(current, max_examples=times * current.max_examples, derandomize=False, database=None)
        test._hypothesis_internal_use_settings = more


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed torch, whose generator begins anywhere, before the fixtures of a test, or of its module, are made."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed remembers where it was called, for each kind of GPU


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """Shells start what runs in the background so that it, and all that it starts, ignores SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in (CACHE_VARIABLE, STATE_VARIABLE):
            patch.setenv(variable, str(tmp_path_factory.mktemp("own")))
        yield


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of this user's that other users can reach, unlike what is below pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="session")
def three_workers() -> Iterator[tvm_split.Workers]:
    """Three real worker processes, started once for the tests that only need some."""
    with tvm_split.Cluster.local(workers=3, threads=1) as cluster:
        cluster.endpoints()  # now, and not when a test counts its processes already
        yield cluster
