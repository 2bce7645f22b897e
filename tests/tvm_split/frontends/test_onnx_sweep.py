"""Every common ONNX operator, imported, compiled by TVM and compared with onnxruntime or ONNX's own evaluator."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("onnx")

from tests.helpers.frontends.comparison import assert_equal_to_source
from tests.helpers.frontends.onnx_cases import CASES
from tvm_split.frontends import load_model


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_operator_has_onnx_s_answer(case: Any) -> None:
    model = load_model(case.model, case.inputs)
    nothing_computed = {f"output_{index}" for index in range(len(model.outputs))}
    assert set(model.layers.values()) <= {"node"} or set(model.layers.values()) <= nothing_computed
    assert_equal_to_source(model, case.inputs)
