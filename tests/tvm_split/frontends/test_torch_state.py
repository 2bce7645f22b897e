"""What a torch module keeps between calls is refused by its path, and importing leaves the module as it was."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.frontends.comparison import assert_equal_to_source, run
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model


def test_state_between_calls_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x + self.count

    with pytest.raises(ModelImportError, match="'count'"):
        load_model(Counter().eval(), torch.randn(1))


def test_a_tensor_attribute_that_is_read_and_assigned_is_state() -> None:
    class Cell(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.reads, self.hidden = reads, torch.ones(2)

        def forward(self, x: Any) -> Any:
            self.hidden = torch.tanh(self.hidden + x if self.reads else x)
            return self.hidden * 2

    with pytest.raises(ModelImportError, match=r"reads 0\.hidden and assigns it .* no state"):
        load_model(nn.Sequential(Cell(reads=True)).eval(), torch.ones(2))
    assert load_model(nn.Sequential(Cell(reads=False)).eval(), torch.ones(2)).layer_names == ("0",)


@dataclass
class _Record:
    last: Any = None


class _Remembering(nn.Module):
    of_class: ClassVar[Any] = torch.zeros(2)

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.change, self.calls, self.last = change, 0, None
        self.tensors, self.by_name, self.record, self.kept = [torch.zeros(2)], {}, _Record(), ([],)

    def forward(self, x: Any) -> Any:
        return self.change(self, x)


def _put(container: Any, key: Any, value: Any) -> Any:
    if isinstance(container, dict | list):
        container[key] = value
    else:
        setattr(container, key, value)
    return value


def _attributes(module: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in {**vars(type(module)), **vars(module)}.items()}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("calls", lambda net, x: x * _put(net, "calls", net.calls + 1)),
        ("last", lambda net, x: _put(net, "last", x if net.last is None else net.last + x) * 2),
        ("added", lambda net, x: x + (net.added if hasattr(net, "added") else _put(net, "added", x))),
        ("tensors.0", lambda net, x: _put(net.tensors, 0, net.tensors[0] + x) * 2),
        ("by_name.last", lambda net, x: _put(net.by_name, "last", net.by_name.get("last", 0) + x) * 2),
        ("record.last", lambda net, x: _put(net.record, "last", x + (net.record.last is not None)) * 2),
        (r"kept.0.\d", lambda net, x: net.kept[0].append(x) or sum(net.kept[0]) * 2),
        ("of_class", lambda net, x: _put(type(net), "of_class", type(net).of_class + x) * 2),
    ],
)
def test_attributes_that_a_call_reads_from_an_earlier_one_are_state(path: str, change: Any) -> None:
    layer = _Remembering(change)
    before = _attributes(layer)
    with pytest.raises(ModelImportError, match=rf"reads 0\.{path} .* no state"):
        load_model(nn.Sequential(layer).eval(), torch.tensor([1.0, 2.0]))
    layer.train()
    assert _attributes(layer) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda net, x: _put(net, "feature", x * 2) + 1,
        lambda net, x: _put(net, "last", x * 2) + 1,
        lambda net, x: _put(net.by_name, "last", x * 2) + 1,
        lambda net, x: _put(type(net), "of_class", x * 2) + 1,
        lambda net, x: x + (_put(net, "last", torch.arange(2.0)) if net.last is None else net.last),
        lambda net, x: x + (net.mask if hasattr(net, "mask") else net.register_buffer("mask", x * 0 + 1) or net.mask),
    ],
)
def test_attributes_that_are_only_written_or_filled_once_are_no_state(change: Any) -> None:
    layer = _Remembering(change).eval()
    before = _attributes(layer)
    model = load_model(layer, torch.tensor([1.0, 2.0]))
    assert _attributes(layer) == before
    assert_equal_to_source(model)


def test_an_attribute_that_is_changed_in_place_is_refused_and_keeps_its_value() -> None:
    layer = _Remembering(lambda net, x: x * net.factor.mul_(2)).eval()
    layer.factor = torch.ones(2)
    with pytest.raises(ModelImportError, match=r"0\.factor is mutated"):
        load_model(nn.Sequential(layer), torch.ones(2))
    assert layer.factor.tolist() == [1, 1]


def test_state_of_closures() -> None:
    kept: dict[str, Any] = {}

    def summed(x: Any) -> Any:
        return _put(kept, "sum", kept.get("sum", 0) + x) * 2

    with pytest.raises(ModelImportError, match=r"reads called_function\.kept\.sum"):
        load_model(summed, torch.ones(2))
    net = nn.Sequential(nn.ReLU()).eval()
    net[0].register_forward_hook(lambda module, inputs, output: kept.update(output=output))
    load_model(net, torch.ones(2))
    assert not kept


def test_functions_of_texts_have_no_module() -> None:
    """Networks that are made from a configuration evaluate the texts of their activations."""

    class Evaluated(nn.Module):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.activation = eval(text, {"torch": torch})

        def forward(self, x: Any) -> Any:
            return self.activation(x)

    assert_equal_to_source(load_model(Evaluated("lambda x: torch.relu(x) + 1").eval(), torch.randn(3)))
    keeping = "(lambda kept: lambda x: kept.update(sum=kept.get('sum', 0) + x) or kept['sum'] * 2)({})"
    with pytest.raises(ModelImportError, match=r"kept\.sum"):
        load_model(Evaluated(keeping).eval(), torch.ones(2))


def test_a_buffer_that_is_only_written_is_no_state() -> None:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(2))

        def forward(self, x: Any) -> Any:
            self.last.copy_(x)
            return self.last * 2

    model = load_model(Scratch().eval(), torch.ones(2))
    assert run(model, [np.float32([1, 2])])[0].tolist() == [2, 4]
