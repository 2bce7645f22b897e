"""Settings of all tests: the same examples in every run, a separate cache folder, no measured times, working Ctrl-C."""

import atexit
import gc
import math
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

# Every run draws the same examples: otherwise an old fault would fail the next change, whatever it is about.
# `make test-more MARKS=hypothesis` draws new ones. There is no deadline, since an example's time depends on the load.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# An idle thread of TVM's pools yields 300,000 times before it sleeps or ends. Dozens of such threads, left by one
# test, would occupy the cores of the following tests, on a busy machine for minutes.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")

# Commands of the documents run in a shell: they find those of this environment, whether or not it is activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

# Tests run in as many processes as there are cores, on small tensors: further threads of torch and numpy only spin.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Torch, TVM and the tests themselves are half a million objects that stay: the collector passes them over.
gc.set_threshold(50_000)
atexit.register(gc.freeze)


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


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Set what is loaded by now, before the fixtures of a test or its module are set up.

    Torch's generator starts anywhere. Other processes that compile kernels import TVM, for cores that run other tests.
    """
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed remembers where it was called, for each kind of GPU
    if kernel_processes := sys.modules.get("tvm_split.compiler.kernel_processes"):
        kernel_processes.SECONDS_PER_PROCESS = math.inf


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """Restore the handler of SIGINT, which background processes of a shell and their children ignore."""
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
    """Yield a folder of this user that other users can reach, unlike pytest's temporary folders."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="session")
def three_workers() -> Iterator[tvm_split.Workers]:
    """Yield three real worker processes, started once for all tests that need any three workers."""
    with tvm_split.Cluster.local(workers=3, threads=1) as cluster:
        cluster.endpoints()  # started now, before a test counts its processes
        yield cluster
