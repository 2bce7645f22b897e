"""Three real worker processes, started once for the tests that only need some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tvm_split


@pytest.fixture(scope="session")
def three_workers() -> Iterator[tvm_split.Cluster]:
    with tvm_split.Cluster.local(workers=3, threads=1) as cluster:
        yield cluster
