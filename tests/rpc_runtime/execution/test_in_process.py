"""A computing thread sets TVM's number of threads for its function, and restores the environment afterwards."""

import os
from contextlib import closing

import pytest

from rpc_runtime.execution.in_process import ComputingThread

VARIABLE = "TVM_NUM_THREADS"


@pytest.mark.parametrize("before", [None, "5"])
def test_the_environment_is_set_for_one_function_at_a_time(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, before) if before else monkeypatch.delenv(VARIABLE, raising=False)

    def compute() -> set[str]:
        return {os.environ[VARIABLE] for _ in range(2000)}

    def fail() -> None:
        raise ValueError("no such thing")

    with closing(ComputingThread(1)) as first, closing(ComputingThread(2)) as second:
        for _ in range(20):
            seen = [thread.submit(compute) for thread in (first, second)]
            assert [future.result() for future in seen] == [{"1"}, {"2"}]
        with pytest.raises(ValueError, match="no such thing"):
            second.submit(fail).result()
    assert os.environ.get(VARIABLE) == before
