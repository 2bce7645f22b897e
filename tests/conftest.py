"""For all tests: what is kept between runs lies in a folder of its own, no times are judged, Ctrl-C can be sent."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from rpc_runtime.loopback_token import STATE_VARIABLE
from tvm_split.cache_folder import CACHE_VARIABLE

# How long an example takes says more about who else computes than about the code.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


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
