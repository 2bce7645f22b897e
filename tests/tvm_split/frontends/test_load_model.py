import importlib
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from tests.helpers.frontends.comparison import run
from tests.helpers.toy import toy_plugin_installed
from tvm_split import Cluster, plan
from tvm_split.errors import ModelImportError, PlanError, UntriedVersionWarning
from tvm_split.frontends import FRONTENDS, load_model


def test_an_installed_package_adds_a_frontend(tmp_path: Path) -> None:
    (tmp_path / "model.toy").write_text("scale multiply 3\nshift add 1")
    with pytest.raises(ModelImportError, match=r"model\.toy"):
        load_model(tmp_path / "model.toy")
    with toy_plugin_installed():
        model = load_model(tmp_path / "model.toy", batch=2)
    assert (model.framework, model.layer_names, model.inputs[0].shape) == ("toy", ("scale", "shift"), (2, 4))
    (output,) = run(model, (np.ones((2, 4), np.float32),))
    np.testing.assert_array_equal(output, np.full((2, 4), 4, np.float32))


class WithoutWork(nn.Module):
    """Some of its modules compute nothing: one before, two between and one behind those that do."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.drop, self.same, self.end = nn.Identity(), nn.Dropout(), nn.Identity(), nn.Dropout()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.last(self.same(self.drop(self.first(self.start(x))))))


def onnx_without_work() -> onnx.ModelProto:
    kinds = {"start": "Identity", "first": "Relu", "drop": "Dropout", "same": "Sum", "last": "Tanh", "end": "Identity"}
    names = ["x", *kinds]
    nodes = [
        helper.make_node(kind, [before], [name], name=name)
        for (name, kind), before in zip(kinds.items(), names, strict=False)
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 4]) for name in ("x", "end")]
    return helper.make_model(helper.make_graph(nodes, "idle", ends[:1], ends[1:]), ir_version=9)


@pytest.mark.parametrize(
    "source", [pytest.param(WithoutWork().eval(), id="torch"), pytest.param(onnx_without_work(), id="onnx")]
)
def test_a_layer_that_computes_nothing_is_refused_as_such_and_not_as_unknown(source: Any) -> None:
    model = load_model(source, (torch.zeros(2, 4),))
    assert model.layer_names == ("first", "last")
    machines = Cluster.local(2)
    for name in ("start", "drop", "same", "end"):
        for choice in ({"split": {"machine-a": [name]}}, {"pin": {name: "machine-a"}}):
            with pytest.raises(PlanError, match=f"layer '{name}'.* for which nothing is computed; .*(it out|this one)"):
                plan(model, machines, estimate=True, **choice)
    if model.framework == "onnx":
        assert [model.empty_layers[name] for name in ("start", "drop", "same", "end")] == ["", "first", "first", "last"]
    with pytest.raises(PlanError, match="'dropped', which the model does not have; near it are"):
        plan(model, machines, estimate=True, split={"machine-a": ["dropped"]})


@pytest.mark.parametrize("base", [base for _, frontend in FRONTENDS.items() for base in frontend.classes])
def test_the_base_classes_of_sources_are_what_frameworks_call_them(base: str) -> None:
    """They are compared by name, so that a framework that renames one is noticed here."""
    module, _, name = base.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    source_class = getattr(importlib.import_module(module), name)
    assert f"{source_class.__module__}.{source_class.__qualname__}" == base


@pytest.mark.parametrize("source", [17, "model.pth", Path("model.pb"), {"weights": 1}, None])
def test_other_sources_are_refused_with_what_is_accepted(source: Any) -> None:
    with pytest.raises(ModelImportError, match=r"\.onnx|\.pt2"):
        load_model(source)


@pytest.mark.parametrize("name", ["missing.onnx", "missing.pt2", "missing.mlir", "missing.jax", "missing.keras"])
def test_missing_files_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named even if its framework is missing too."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ModelImportError, match=f"no file .*{name}"):
        load_model(tmp_path / name)


@pytest.mark.parametrize("name", ["broken.onnx", "broken.pt2"])
def test_broken_files_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x08\xff no model")
    with pytest.raises(ModelImportError, match=name):
        load_model(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "extra"), [("model.onnx", "onnx"), ("model.pt2", "torch"), ("model.mlir", "jax"), ("model.keras", "keras")]
)
def test_a_missing_framework_is_named_with_its_extra(
    name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ModelImportError, match=rf"pip install tvm-split\[{extra}\]"):
        load_model(tmp_path / name)


def test_frameworks_are_imported_only_when_needed() -> None:
    # TVM imports torch itself where it finds it, so the room's own modules are looked for.
    code = (
        "import sys; sys.modules['torch'] = None; import tvm_split.frontends as room\n"
        "own = [name for name in sys.modules if name.startswith(room.__name__)]\n"
        "sys.exit('onnx' in sys.modules or any('.torch' in name or '.onnx' in name for name in own))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_untried_torch_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.delitem(sys.modules, "tvm_split.frontends.torch.load", raising=False)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            load_model(torch.nn.ReLU().eval(), (torch.zeros(2, 3),))
    (text,) = (str(warning.message) for warning in caught if warning.category is UntriedVersionWarning)
    assert "torch 2.99.0" in text
    assert "pip install 'torch" in text


def test_the_installed_torch_is_a_tried_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tvm_split.frontends.torch.load", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntriedVersionWarning)
        load_model(torch.nn.ReLU().eval(), (torch.zeros(2, 3),))
