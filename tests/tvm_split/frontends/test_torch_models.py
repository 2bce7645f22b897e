"""Whole networks of the usual kinds, tiny."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.frontends.comparison import assert_equal_to_source
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.models.torch_models import small_models
from tvm_split.frontends import load_model


@pytest.mark.parametrize(
    "name",
    ["resnet", "bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vgg", "mobilenet", "vit", "gpt2"))],
)
def test_network_has_torch_s_answer(name: str) -> None:
    module, inputs = small_models()[name]
    model = load_model(module, inputs, name=name)
    assert_keeps_contract(model)
    assert model.name == name
    assert_equal_to_source(model)
