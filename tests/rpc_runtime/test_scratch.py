import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rpc_runtime.scratch import PREFIX, ScratchFolder, remove_orphans

OWNER = """
from rpc_runtime.scratch import ScratchFolder
folder = ScratchFolder('test')
print(folder.path, flush=True)
input()
"""
CLOSING = """
import os, threading
from rpc_runtime.processes import clear_away
from rpc_runtime.scratch import ScratchFolder
folder = ScratchFolder('test')
for number in range(20_000):
    (folder.path / str(number)).touch()
print(folder.path, flush=True)
before = len(os.listdir(folder.path))
threading.Thread(target=folder.close, daemon=True).start()
while len(os.listdir(folder.path)) == before:
    pass
clear_away()
os._exit(0)
"""
SWEEPER = """
from rpc_runtime.scratch import remove_orphans
print(flush=True)
while True:
    remove_orphans()
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_it_goes_when_it_is_closed() -> None:
    with ScratchFolder("test") as folder:
        (folder.path / "file").write_text("content")
    assert not folder.path.exists()
    folder.close()


def test_it_goes_with_its_object() -> None:
    folder = ScratchFolder("test")
    path = folder.path
    del folder
    gc.collect()
    assert not path.exists()


def test_it_goes_after_its_process_was_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    remove_orphans()
    assert path.exists()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert path.exists()
    remove_orphans()
    assert not path.exists()


def test_it_goes_if_its_process_ends_while_a_thread_closes_it() -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSING], capture_output=True, text=True, check=True, timeout=60)
    assert not Path(ended.stdout.strip()).exists()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    foreign = tmp_path / f"{PREFIX}notes"
    foreign.mkdir()
    remove_orphans()
    assert foreign.exists()


def test_a_new_folder_is_no_orphan_whenever_it_is_looked_at() -> None:
    sweeper = subprocess.Popen([sys.executable, "-c", SWEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sweeper.stdout is not None
    sweeper.stdout.readline()
    try:
        for _ in range(150):
            with ScratchFolder("test") as folder:
                (folder.path / "file").touch()
    finally:
        sweeper.kill()
        sweeper.communicate()
