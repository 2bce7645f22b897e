"""Workers that tests may break."""

from collections.abc import Iterator

import pytest

from rpc_runtime.client.local_workers import LocalWorkers
from tests.helpers.rpc_runtime.recoveries import drain


@pytest.fixture
def mortals(workers: LocalWorkers) -> Iterator[LocalWorkers]:
    """Workers of other tests, which a test may drain, and of which it may kill some: those are started again."""
    yield workers
    for name in workers.ended:
        workers.restart(name)
    for endpoint in workers.endpoints.values():
        drain(endpoint, False)
