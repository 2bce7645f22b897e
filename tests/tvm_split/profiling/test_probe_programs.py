"""Stages that only pass tensors on do so as stages that compute something: their results are nobody's view."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from rpc_runtime.execution.loaded_stage import LoadedStage, tensor_bytes, tensor_slot
from tvm_split.profiling.probe_programs import ProbePrograms


@pytest.mark.parametrize(("taken", "made"), [(64, 64), (256, 64), (64, 256)])
def test_what_is_handed_on_is_computed_and_not_copied_by_the_runtime(taken: int, made: int) -> None:
    programs = ProbePrograms({"here": platform.machine()})
    (stage,) = programs.chain(["here"], [taken, made]).stages
    library = np.fromfile(programs.blob_path(stage.library.sha256), np.uint8)
    executable = LoadedStage(stage, library, (), {})
    slot = tensor_slot(stage.inputs[0])
    given = np.arange(taken).astype(np.uint8)
    slot.data[:] = given
    (result,) = executable.run([slot.value])
    assert np.array_equal(tensor_bytes(result), 255 - (given[:made] if taken >= made else np.repeat(given[:1], made)))
    assert executable._are_views == [False]
