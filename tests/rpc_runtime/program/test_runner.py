"""Results that answer by position and by name."""

import copy
import pickle

import numpy as np
import pytest

from rpc_runtime.errors import InputError
from rpc_runtime.program.runner import Outputs

OUTPUTS = Outputs((np.zeros(2), np.ones(3)), ("logits", "hidden.0"))


@pytest.mark.parametrize("outputs", [OUTPUTS, copy.deepcopy(OUTPUTS), pickle.loads(pickle.dumps(OUTPUTS))])
def test_by_name_and_by_position(outputs):
    logits, hidden = outputs
    assert outputs["logits"] is outputs[0] is logits
    assert outputs["hidden.0"] is outputs[-1] is hidden
    assert [array.shape for array in outputs[1:]] == [(3,)]
    assert {name: array.shape for name, array in dict(outputs).items()} == {"logits": (2,), "hidden.0": (3,)}
    assert "logits" in outputs
    assert "scores" not in outputs
    assert "logits=array" in repr(outputs)


def test_a_name_that_is_not_there():
    with pytest.raises(InputError, match=r"no output is named 'logit'; the outputs are logits, hidden\.0"):
        OUTPUTS["logit"]
