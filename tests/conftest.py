"""For all tests: what is measured is kept in a folder of their own, and not in the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tvm_split.cache_folder import CACHE_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ[CACHE_VARIABLE]
    else:
        os.environ[CACHE_VARIABLE] = before
