"""What a worker lets go of, whatever a GPU says: by a stand-in of CUDA's runtime, that fails from some moment on."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import numpy as np
import pytest
import tvm

from rpc_runtime.errors import ProtocolError
from rpc_runtime.execution.blob_store import BlobStore
from rpc_runtime.execution.cuda_calls import CudaCalls
from rpc_runtime.execution.device_transfers import DeviceTransfers
from rpc_runtime.program.machine_plan import machine_plan
from rpc_runtime.worker import held_program
from rpc_runtime.worker.service import HeldPrograms
from tests.helpers.rpc_runtime.cuda_stand_in import compiled, on_host
from tests.helpers.rpc_runtime.program_maker import ProgramMaker
from tests.helpers.rpc_runtime.programs import A, one_stage

NAMES = ("first000000000000", "second00000000000", "third000000000000")


def test_all_is_freed_when_a_gpu_has_failed(
    tmp_path: Path, maker: ProgramMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = ctypes.CDLL(str(compiled(tmp_path)))
    program, store = one_stage(maker), BlobStore(tmp_path / "store")
    plan, (stage,) = machine_plan(program, A), program.stages
    made: list[DeviceTransfers] = []

    def transfers_of_the_stand_in(stages: object) -> DeviceTransfers:
        made.append(DeviceTransfers(CudaCalls(cuda), on_host))
        return made[-1]

    monkeypatch.setattr(held_program, "overlapping_transfers", transfers_of_the_stand_in)
    changes: list[tuple[str, ...]] = []
    programs = HeldPrograms(store, None)
    for name in NAMES:
        held = programs.begin(name)
        for blob in held.blobs.keep(stage.blobs):
            held.blobs.take_in(blob, [maker.blob_path(blob.sha256).read_bytes()])
        held.load(plan, {}, 60.0, lambda: True)
        made[-1].upload(stage.inputs[0], tvm.runtime.tensor(np.zeros((2, 8), "float32")))
    programs.on_change = lambda: changes.append(tuple(programs.names()))
    loaded = [programs.get(name) for name in NAMES]
    (pins,) = (tmp_path / "store" / "pins").iterdir()
    assert stage.library.sha256 in pins.read_text()

    cuda.standInFail(700)
    caplog.set_level(logging.ERROR)
    programs.drop(NAMES[0])
    assert changes == [tuple(name[:8] for name in NAMES[1:])]
    programs.close()
    for held in loaded:
        assert held.closed
        held.close()
    assert stage.library.sha256 not in pins.read_text()
    assert [each.getMessage() for each in caplog.records] == [
        f"deployment {name[:8]}: what failed while it was freed: the GPU fails: cudaEventSynchronize: "
        "an illegal memory access was encountered"
        for name in NAMES
    ]
    with pytest.raises(ProtocolError, match="has no deployment"):
        programs.get(NAMES[1])
    store.close()
