"""Every common operation of JAX and operator of TFLite, imported, compiled and compared with JAX or LiteRT."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from tests.helpers.frontends import jax_cases, tflite_cases
from tests.helpers.frontends.comparison import assert_close, run
from tests.helpers.frontends.contract import assert_keeps_contract
from tvm_split.compiler.verification import first_differing_layer
from tvm_split.frontends import load_model
from tvm_split.model import Model


def assert_answers(
    model: Model, inputs: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float | None, steps: int = 0
) -> None:
    """The model and each of its layers have the framework's answers; integers may be so many ``steps`` apart."""
    assert_keeps_contract(model)
    for actual, right in zip(run(model, inputs), expected, strict=True):
        assert (str(actual.dtype), actual.shape) == (str(right.dtype), right.shape)
        if steps:
            assert np.abs(actual.astype("int64") - right.astype("int64")).max() <= steps
        else:
            assert_close(actual, right, tolerance)
    if model.layers and not steps:
        assert first_differing_layer(model, model.reference, inputs) is None


@pytest.mark.parametrize("case", jax_cases.CASES, ids=[case.name for case in jax_cases.CASES])
def test_operation_has_the_answer_of_jax(case: jax_cases.Case) -> None:
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(case.function)(*case.inputs))]
    assert_answers(load_model(case.function, case.inputs), case.inputs, expected, case.tolerance)


@pytest.mark.parametrize("case", tflite_cases.CASES, ids=[case.name for case in tflite_cases.CASES])
def test_operator_has_the_answer_of_litert(case: tflite_cases.Case) -> None:
    model = load_model(case.content, case.inputs)
    assert_answers(model, case.inputs, model.reference.outputs(case.inputs), case.tolerance, case.steps)
