"""MPI passes the tests of all transports, and a process that cannot be a rank gives the reason."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers.rpc_runtime import mpi_ranks
from tests.helpers.rpc_runtime.worker_process import ROOT

SHARED = Path("/dev/shm")
PEERS = 6
"""The number of peers: two are killed in each of two roles, and one is stopped."""


@pytest.mark.slow
def test_it_keeps_to_what_every_transport_does(tmp_path: Path) -> None:
    suite, ranks = "tests/rpc_runtime/transports/test_transports.py", mpi_ranks.PEERS_FROM + PEERS
    report, output = mpi_ranks.run_session(tmp_path, ranks, suite, seconds=250)
    assert report.exists(), output
    results = ElementTree.parse(report).getroot().find("testsuite")
    assert results is not None
    assert int(results.get("tests", 0)) > 20, output
    assert [results.get(kind) for kind in ("failures", "errors", "skipped")] == ["0", "0", "0"], output


def joining(before: str) -> str:
    end = "sys.exit(main(sys.stdout, ['--transport', 'mpi']))"
    return f"import sys; {before}; from rpc_runtime.worker.process import main; {end}"


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("sys.modules['mpi4py'] = None", "pip install 'tvm-split[mpi]'"),
        ("pass", "alone in its MPI world: start all workers by one mpiexec"),
    ],
    ids=["not installed", "no mpiexec"],
)
def test_a_worker_that_cannot_be_a_rank_says_why(before: str, message: str) -> None:
    command = [sys.executable, "-c", joining(before)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_nobody_waits_for_a_rank_that_does_not_come() -> None:
    code = "from rpc_runtime.transports import mpi; mpi.join(1.0)"
    # If it ends before MPI has registered it, mpiexec waits for the other process.
    command = [mpi_ranks.MPIEXEC, "-n", "1", sys.executable, "-c", code, ":", "-n", "1", "sleep", "20"]
    before = set(SHARED.iterdir())
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    for segment in set(SHARED.glob("mpich_shm_*")) - before:  # MPICH's, of a world that was never complete
        segment.unlink()
    assert ended.returncode
    assert "_initialized_when_all_ranks_are_there" in ended.stderr
