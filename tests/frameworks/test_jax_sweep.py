"""Every common operation of JAX, imported from StableHLO, compiled and compared with JAX."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.helpers.frontends.comparison import assert_close, run
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.helpers.frontends.jax_cases import CASES, Case
from tvm_split.compiler.verification import first_parting_layer
from tvm_split.frontends import load_model


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_operation_has_the_answer_of_jax(case: Case) -> None:
    model = load_model(case.function, case.inputs)
    assert_keeps_contract(model)
    found = run(model, case.inputs)
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(case.function)(*case.inputs))]
    assert len(found) == len(wanted)
    for mine, right in zip(found, wanted, strict=True):
        assert (str(mine.dtype), mine.shape) == (str(right.dtype), right.shape)
        assert_close(mine, right, case.tolerance)
    if model.layers:
        assert first_parting_layer(model, model.reference, case.inputs) is None
