"""A second user of a worker's host who may write to its folders: no code of theirs runs in the worker."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.rpc_runtime.pipelines import open_on
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, batches_for, double
from tvm_split.rpc_runtime.client.local_workers import LocalWorkers
from tvm_split.rpc_runtime.files import WRITING


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_is_swapped_in_after_it_was_verified_is_not_loaded(tmp_path: Path) -> None:
    source, hostile, loaded = (tmp_path / name for name in ("hostile.c", "hostile.so", "loaded"))
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void begin(void) "
        f'{{ fclose(fopen("{loaded}", "w")); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", hostile, source], check=True)
    with LocalWorkers([A], cache=tmp_path / "cache") as own, swapping(tmp_path / "cache/temporary", hostile):
        for columns in range(1, 6):
            maker = ProgramMaker(tmp_path / str(columns))
            x = maker.input("x", (2, columns))
            program = maker.program([maker.stage(f"s{columns}", A, [x], double)])
            batch = batches_for(program, 1)[0]
            with open_on(own, program, maker) as pipeline:
                np.testing.assert_array_equal(pipeline.run(batch)[0], 2 * batch[0])
    assert not loaded.exists()


@contextlib.contextmanager
def swapping(folder: Path, hostile: Path) -> Iterator[None]:
    """Inside, whatever appears in a folder is replaced, but for uploads: those are verified afterwards."""
    ended, copy = threading.Event(), hostile.with_suffix(".copy")

    def swap() -> None:
        while not ended.is_set():
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    if not path.name.startswith(WRITING) and not path.samefile(hostile):
                        copy.hardlink_to(hostile)
                        copy.replace(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
