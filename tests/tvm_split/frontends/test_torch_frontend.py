from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.helpers.frontends.comparison import assert_close, assert_equal_to_source, run
from tests.helpers.frontends.contract import assert_keeps_contract
from tests.helpers.frontends.torch_case import Function
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.relu(self.conv1(x))
        y += x
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.fc(self.layer1(x).flatten(1)))


def image(batch: int = 2) -> Any:
    return torch.randn(batch, 3, 2, 2)


def test_layers_have_the_user_s_names_in_order_of_execution() -> None:
    model = load_model(Net().eval(), image())
    assert_keeps_contract(model)
    assert model.layer_names == (
        "layer1.0.conv1", "layer1.0.relu", "layer1.0.add_", "layer1.0.relu@1",
        "layer1.1.conv1", "layer1.1.relu", "layer1.1.add__1", "layer1.1.relu@1",
        # Torch makes the view of a tensor that was changed in place anew where it is used: flatten is in fc.
        "fc", "relu",
    )  # fmt: skip
    assert model.layers["layer1_0_conv1"] == "layer1.0.conv1"
    assert model.layers["layer1_0_conv1_1"] == "layer1.0.conv1"
    assert (model.name, model.framework) == ("Net", "torch")


def test_a_module_used_twice_counts_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Any) -> Any:
            return self.block(self.block(x))

    names = load_model(Twice().eval(), image()).layer_names
    assert "block.conv1" in names
    assert "block.conv1@1" in names
    assert any(name.startswith("block@1.add_") for name in names)


def test_reference_names_every_value_of_the_module() -> None:
    model = load_model(Net().eval(), image())
    assert model.reference is not None
    assert model.example_inputs is not None
    values = list(model.reference.values(model.example_inputs))
    names = [name for name, _ in values]
    assert len(set(names)) == len(names)
    assert set(names) <= set(model.layers)
    shapes = {
        binding.var.name: binding.var.ty for block in model.module["main"].body.blocks for binding in block.bindings
    }
    for name, value in values:
        assert value.shape == tuple(int(size) for size in shapes[name].shape)
        assert str(value.dtype) == str(shapes[name].dtype)
    assert list(dict.fromkeys(model.layers[name] for name in names)) == list(model.layer_names)
    assert_close(values[-1][1], model.reference.outputs(model.example_inputs)[0])


def test_inputs_and_outputs_are_flat_in_torch_s_order() -> None:
    def forward(x: Any, others: Any, *, scale: Any) -> Any:
        return {"sum": x + others["b"], "nested": [others["a"] * scale, (x,)], "again": x}

    arguments = (torch.randn(2, 3), {"b": torch.randn(2, 3), "a": torch.arange(4)})
    program = torch.export.export(Function(forward), arguments, {"scale": torch.tensor(3)})
    model = load_model(program)
    assert_keeps_contract(model)
    assert [spec.dtype for spec in model.inputs] == ["float32", "float32", "int64", "int64"]
    assert [spec.dtype for spec in model.outputs] == ["float32", "int64", "float32", "float32"]
    assert [spec.name for spec in model.outputs] == ["sum", "nested.0", "nested.1.0", "again"]
    assert_equal_to_source(model)


class Scores(NamedTuple):
    logits: Any
    hidden: Any


@dataclass
class Heads:
    logits: Any
    hidden: tuple[Any, ...]


torch.export.register_dataclass(Heads, serialized_type_name="Heads")


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A result as those of Hugging Face: a dataclass that is a mapping of the fields that are not None."""

    logits: Any = None
    unused: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: ModelOutput(**dict(zip(names, values, strict=True))),
    serialized_type_name="ModelOutput",
)


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda x, y: x, ["output_0"]),
        (lambda x, y: (x, [y]), ["output_0", "output_1"]),
        (lambda x, y: OrderedDict(z=x, a=y), ["z", "a"]),
        (lambda x, y: Scores(x, y), ["logits", "hidden"]),
        (lambda x, y: ModelOutput(logits=x, hidden=(y, x)), ["logits", "hidden.0", "hidden.1"]),
        (lambda x, y: Heads(x, (y, x)), ["logits", "hidden.0", "hidden.1"]),
        (lambda x, y: ({"a.b": x}, {"a": {"b": y}}), ["0.a.b", "1.a.b"]),
        (lambda x, y: {"a.b": x, "a": {"b": y}}, ["a.b", "a.b_1"]),
    ],
)
def test_outputs_have_the_names_of_the_source(returned: Any, names: list[str], tmp_path: Path) -> None:
    program = torch.export.export(Function(lambda x: returned(x * 2, x + 1)), (torch.ones(2),))
    sources = [program]
    if not isinstance(returned(0, 0), Scores):  # torch saves no named tuples
        torch.export.save(program, tmp_path / "net.pt2")
        sources.append(tmp_path / "net.pt2")
    for source in sources:
        assert [spec.name for spec in load_model(source).outputs] == names


def test_keyword_inputs_are_given_as_a_dict() -> None:
    model = load_model(Function(lambda x, y: x - 2 * y), {"y": torch.ones(3), "x": torch.zeros(3)})
    assert len(model.inputs) == 2
    assert_equal_to_source(model)


@pytest.mark.parametrize("other", [3, None, True])
def test_arguments_that_are_no_tensors_stay_as_they_were_given(other: Any) -> None:
    model = load_model(Function(lambda x, other: x * 2 if other is None else x * other), (torch.ones(2), other))
    assert len(model.inputs) == 1
    assert_equal_to_source(model, [np.float32([5, 7])])


def test_arrays_are_taken_as_example_inputs() -> None:
    model = load_model(nn.ReLU(), np.float32([[-1, 1]]))
    assert run(model, [np.float32([[-3, 3]])])[0].tolist() == [[0, 3]]


def test_constants_and_buffers() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ids", torch.arange(8)[None], persistent=False)
            self.embedding = nn.Embedding(8, 4)

        def forward(self, x: Any) -> Any:
            return x + self.embedding(self.ids[:, : x.shape[1]]), self.ids[:, :2]

    model = load_model(Positions().eval(), torch.randn(2, 5, 4))
    assert_keeps_contract(model)
    assert_equal_to_source(model)


def test_imported_weights_are_copies() -> None:
    layer = nn.Linear(2, 2)
    model = load_model(layer, torch.ones(1, 2))
    before = run(model, [np.ones((1, 2), np.float32)])[0]
    with torch.no_grad():
        layer.weight.zero_()
    np.testing.assert_array_equal(run(model, [np.ones((1, 2), np.float32)])[0], before)


def test_parameters_shared_by_two_layers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.embedding(tokens))

    model = load_model(Tied().eval(), torch.tensor([[1, 5]]))
    assert_equal_to_source(model)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_training_mode_is_refused(layer: Any) -> None:
    with pytest.raises(ModelImportError, match=r"1.*model\.eval\(\)"):
        load_model(nn.Sequential(nn.Linear(3, 3), layer), torch.randn(2, 3))


def test_training_mode_that_changes_nothing_is_accepted() -> None:
    load_model(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), torch.randn(2, 3))


def test_a_module_needs_example_inputs() -> None:
    with pytest.raises(ModelImportError, match=r"Linear.*example_inputs"):
        load_model(nn.Linear(2, 2))


REFUSED = {
    "_cdist_forward.default in cdist": lambda x: torch.cdist(x, x),
    "rand_like.default.*random.* in rand_like": lambda x: x + torch.rand_like(x),
    "cummax.default in cummax": lambda x: x.cummax(0),
    "'max_pool.*result 1 ": lambda x: torch.nn.functional.max_pool2d(x[None, None], 2, return_indices=True),
    "cond|sub-graph": lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
    "not a tensor": lambda x: (x, 3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_imported_is_named_with_its_layer(message: str) -> None:
    with pytest.raises(ModelImportError, match=message):
        load_model(Function(REFUSED[message]), torch.randn(4, 4))


def test_all_operators_that_cannot_be_imported_are_named_at_once() -> None:
    with pytest.raises(ModelImportError, match=r"(?s)cummax.*cdist|cdist.*cummax") as caught:
        load_model(Function(lambda x: torch.cdist(x, x.cummax(0).values)), torch.randn(4, 4))
    assert "with other operators, or give the part of the model before or after them" in str(caught.value)


def exported(**shapes: Any) -> Any:
    dimension = torch.export.Dim("batch", min=1, max=64)
    length = torch.export.Dim("length", min=2, max=32)
    return torch.export.export(
        Function(lambda x: (x.reshape(x.shape[0], -1) * x.shape[1], x + 1)), (torch.randn(3, 4, 2),),
        dynamic_shapes={"inputs": ({0: dimension, 1: length},)},
    )  # fmt: skip


def test_open_sizes_are_bound_by_batch_and_name() -> None:
    model = load_model(exported(), batch=5, dimensions={"inputs_0[1]": 7})
    assert_keeps_contract(model)
    assert model.inputs[0].shape == (5, 7, 2)
    assert model.outputs[0].shape == (5, 14)
    assert_equal_to_source(model, [np.random.default_rng(0).standard_normal((5, 7, 2)).astype("float32")])


def test_open_sizes_follow_the_example_inputs() -> None:
    model = load_model(exported(), torch.randn(2, 6, 2))
    assert model.inputs[0].shape == (2, 6, 2)
    assert_equal_to_source(model)
    assert model.reference is not None
    assert len(list(model.reference.values(model.example_inputs))) == 3


@pytest.mark.parametrize(
    ("batch", "dimensions", "message"),
    [
        (5, {}, r"axis 1 of input 'inputs_0'.*dimensions="),
        (5, {"inputs_0[0]": 3, "inputs_0[1]": 4}, r"batch gives inputs_0\[0\] the size 5.*the size 3"),
        (5, {"inputs_0[1]": 4, "inputs_0[2]": 3}, r"dimensions\['inputs_0\[2\]'\].*size 3.*fixed size 2"),
        (65, {"inputs_0[1]": 4}, r"65.*1 to 64"),
        (5, {"sequence": 4}, r"'sequence'.*inputs_0\[1\]"),
    ],
    ids=["open", "contradicting", "fixed", "outside the bounds", "unknown"],
)
def test_sizes_that_cannot_be_bound_are_named(batch: int, dimensions: dict[str, int], message: str) -> None:
    with pytest.raises(ModelImportError, match=message):
        load_model(exported(), batch=batch, dimensions=dimensions)


def test_example_inputs_that_disagree_on_one_open_size() -> None:
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(
        Function(lambda x, y: (x.sum(1) + y.sum(1)) * 2), (torch.randn(3, 4), torch.randn(3, 5)),
        dynamic_shapes={"inputs": (batch, batch)},
    )  # fmt: skip
    assert load_model(program, (torch.randn(2, 4), torch.randn(2, 5))).outputs[0].shape == (2,)
    with pytest.raises(ModelImportError, match=r"inputs_1\[0\] the size 3.*inputs_0\[0\] the size 2"):
        load_model(program, (torch.randn(2, 4), torch.randn(3, 5)))


def derived() -> Any:
    """A program of x [h, 2] and y [2 h, 2], and one of y alone with 2 h + 1 rows, whose h no input has."""
    h = torch.export.Dim("h", min=2, max=32)
    both = torch.export.export(
        Function(lambda x, y: (torch.cat([x, x]) + y).sum(1)), (torch.randn(3, 2), torch.randn(6, 2)),
        dynamic_shapes={"inputs": ({0: h}, {0: 2 * h})},
    )  # fmt: skip
    alone = torch.export.export(
        Function(lambda y: y * 2), (torch.randn(7, 2),), dynamic_shapes={"inputs": ({0: 2 * h + 1},)}
    )
    return both, alone


def test_a_size_that_follows_from_another_binds_it() -> None:
    both, alone = derived()
    for dimensions in ({"inputs_0[0]": 4}, {"inputs_1[0]": 8}, {"inputs_0[0]": 4, "inputs_1[0]": 8}):
        model = load_model(both, dimensions=dimensions)
        assert [spec.shape for spec in model.inputs] == [(4, 2), (8, 2)]
    assert [spec.shape for spec in load_model(both, batch=4).inputs] == [(4, 2), (8, 2)]
    assert load_model(alone, dimensions={"inputs_0[0]": 9}).inputs[0].shape == (9, 2)
    assert load_model(alone, batch=9).inputs[0].shape == (9, 2)
    model = load_model(alone, torch.randn(5, 2))
    assert_equal_to_source(model)


def test_a_size_that_cannot_follow_from_another_is_refused() -> None:
    both, alone = derived()
    with pytest.raises(ModelImportError, match=r"inputs_1\[0\] the size 6, but .*inputs_0\[0\] the size 4"):
        load_model(both, dimensions={"inputs_0[0]": 4, "inputs_1[0]": 6})
    with pytest.raises(ModelImportError, match=r"inputs_1\[0\] the size 6, but .*inputs_0\[0\] the size 4"):
        load_model(both, (torch.randn(4, 2), torch.randn(6, 2)))
    with pytest.raises(ModelImportError, match=r"inputs_0\[0\] the size 8"):
        load_model(alone, dimensions={"inputs_0[0]": 8})
    with pytest.raises(ModelImportError, match=r"2 to 32"):
        load_model(both, dimensions={"inputs_1[0]": 80})
    with pytest.raises(ModelImportError, match=r"dimensions=\{'inputs_0\[0\]'"):
        load_model(alone)


def test_batch_of_a_module_repeats_the_example_s_rows() -> None:
    model = load_model(Net().eval(), image(2), batch=5)
    assert model.inputs[0].shape == (5, 3, 2, 2)
    assert model.example_inputs is not None
    np.testing.assert_array_equal(model.example_inputs[0][0], model.example_inputs[0][2])
    with pytest.raises(ModelImportError, match=r"batch=4"):
        load_model(Function(lambda x, y: x.sum() + y.sum()), (torch.randn(2), torch.randn(3)), batch=4)


def test_a_program_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my-net.pt2"
    torch.export.save(torch.export.export(Net().eval(), (image(),)), path)
    model = load_model(path)
    assert_keeps_contract(model)
    assert model.name == "my_net"
    assert "layer1.0.add_" in model.layer_names
    assert_equal_to_source(model)


def test_a_model_passes_through() -> None:
    model = load_model(nn.ReLU(), torch.randn(2))
    assert load_model(model) is model
