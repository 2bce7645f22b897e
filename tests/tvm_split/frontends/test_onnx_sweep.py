"""Every common ONNX operator, imported, compiled by TVM and compared with onnxruntime or ONNX's own evaluator.

Cases of an opset are compiled in groups. A case whose group fails is tried alone, so that the failure names it.
"""

from functools import cache
from itertools import groupby

import numpy as np
import pytest

from tests.helpers.frontends.comparison import assert_equal_to_source, run
from tests.helpers.frontends.onnx_cases import CASES, Case, merged
from tvm_split.frontends import load_model

GROUP = 32


def opset_of(case: Case) -> int:
    return int(case.model.opset_import[0].version)


OPSETS = [list(cases) for _, cases in groupby(sorted(CASES, key=opset_of), opset_of)]
GROUPS = [cases[first : first + GROUP] for cases in OPSETS for first in range(0, len(cases), GROUP)]
PLACES = [(number, place) for number, cases in enumerate(GROUPS) for place in range(len(cases))]


@cache
def outputs_of_group(number: int) -> list[list[np.ndarray]] | None:
    """Return TVM's outputs of each case of a group; None if the group cannot be loaded or run."""
    cases = GROUPS[number]
    inputs = [array for case in cases for array in case.inputs]
    try:
        outputs = iter(run(load_model(merged([case.model for case in cases]), inputs), inputs))
    except Exception:
        return None
    return [[next(outputs) for _ in case.model.graph.output] for case in cases]


@pytest.mark.parametrize(("number", "place"), PLACES, ids=[GROUPS[number][place].name for number, place in PLACES])
def test_operator_has_onnx_s_answer(number: int, place: int) -> None:
    case, group = GROUPS[number][place], outputs_of_group(number)
    model = load_model(case.model, case.inputs)
    nothing_computed = {f"output_{index}" for index in range(len(model.outputs))}
    assert set(model.layers.values()) <= {"node"} or set(model.layers.values()) <= nothing_computed
    assert_equal_to_source(model, case.inputs, computed=run if group is None else lambda *_: group[place])
