"""Every common operator of TFLite, imported, compiled and compared with LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.frontends.comparison import assert_close, run
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.helpers.frontends.tflite_cases import CASES, Case
from tvm_split.compiler.verification import first_parting_layer
from tvm_split.frontends import load_model


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_operator_has_the_answer_of_litert(case: Case) -> None:
    model = load_model(case.content, case.inputs)
    assert_keeps_contract(model)
    wanted = model.reference.outputs(case.inputs)
    for mine, right in zip(run(model, case.inputs), wanted, strict=True):
        assert (str(mine.dtype), mine.shape) == (str(right.dtype), right.shape)
        if case.steps:
            assert np.abs(mine.astype("int64") - right.astype("int64")).max() <= case.steps
        else:
            assert_close(mine, right, case.tolerance)
    if not case.steps:
        assert first_parting_layer(model, model.reference, case.inputs) is None
