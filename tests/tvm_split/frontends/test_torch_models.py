"""Whole networks of the usual kinds, tiny."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._decomp import get_decompositions  # noqa: E402

from tests.helpers.frontends.comparison import assert_equal_to_source  # noqa: E402
from tests.helpers.frontends.contract import assert_keeps_contract  # noqa: E402
from tests.models.torch_models import small_models  # noqa: E402
from tvm_split.frontends import load_model  # noqa: E402
from tvm_split.frontends.torch.graph import KEPT_OPERATORS, TAKEN_APART, decomposed  # noqa: E402


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


@pytest.mark.parametrize("name", ["bert", pytest.param("efficientnet", marks=pytest.mark.slow)])
def test_operators_are_taken_apart_as_by_torch_s_own_slower_way(name: str) -> None:
    module, inputs = small_models()[name]
    program = torch.export.export(module, tuple(inputs))
    table = torch.export.default_decompositions()
    table.update(get_decompositions(TAKEN_APART))
    for operator in KEPT_OPERATORS:
        table.pop(operator, None)
    with torch.no_grad():
        expected = program.run_decompositions(table)
    actual = decomposed(program)
    assert actual.graph_module.code == expected.graph_module.code
    assert actual.graph_signature == expected.graph_signature
