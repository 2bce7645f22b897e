"""Operators that onnxruntime's optimiser writes, compared with onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnxruntime.transformers import optimizer
from torch import nn

from tests.helpers.frontends.comparison import assert_equal_to_source, run_as_stage
from tests.helpers.frontends.onnx_cases import merged, node_model, random
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model

BATCH, ROWS, HEADS, WIDTH = 2, 4, 2, 6
X, PAST = random(BATCH, ROWS, WIDTH), 3
WEIGHT, BIAS = random(WIDTH, 3 * WIDTH), random(3 * WIDTH)
KEYS = random(BATCH, HEADS, PAST, WIDTH // HEADS)
MASK = np.int32([[1, 1, 1, 0], [1, 1, 0, 0]])
SQUARE_MASK = np.int32(random(BATCH, ROWS, ROWS) > -0.5)
QUERY, KEY, VALUE = random(BATCH, 5, WIDTH), random(BATCH, 7, WIDTH), random(BATCH, 7, 8)
ADDED = random(BATCH, HEADS, ROWS, ROWS)
ROW = [random(WIDTH, seed=seed) for seed in range(3)]

Case = tuple[str, list[Any], list[Any], dict[str, Any]]
HEADED = {"num_heads": HEADS}
CASES: list[Case] = [
    *(
        ("Attention", [X], [WEIGHT, BIAS, mask], {**HEADED, **options})
        for mask in (None, np.int32([2, 4]), np.int32([3, 4, 1, 0]), np.int32([2, 4, 0, 2, 6, 0, 4, 8]),
                     np.int32([[0], [1]]), MASK, SQUARE_MASK)
        for options in ({}, {"unidirectional": 1}, {"scale": 0.3}, {"mask_filter_value": -5.0})
    ),
    ("Attention", [X], [WEIGHT, BIAS, None, None, ADDED], HEADED),
    ("Attention", [X], [WEIGHT, BIAS, None, np.stack([KEYS, -KEYS])], {**HEADED, "unidirectional": 1, "outputs": 2}),
    ("Attention", [X], [random(WIDTH, 16), random(16)], {**HEADED, "qkv_hidden_sizes": [4, 4, 8]}),
    ("Attention", [X], [random(WIDTH, 24), random(24)], HEADED),
    *(
        ("MultiHeadAttention", [X, -X, X], [BIAS, mask, added], {**HEADED, **options})
        for mask, added in ((None, None), (np.int32([2, 4]), None), (MASK, ADDED))
        for options in ({}, {"scale": 0.3}, {"unidirectional": 1})
    ),
    *(
        ("MultiHeadAttention", [query, KEY, value], [bias, mask], {**HEADED, **options})
        for query, value, bias in ((QUERY, KEY, BIAS), (QUERY, VALUE, random(20)), (QUERY[:, :1], VALUE, None))
        for mask in (None, np.int32([3, 7]))
        for options in ({}, {"unidirectional": 1})
    ),
    *(("MultiHeadAttention", [X, KEYS, -KEYS], [bias], HEADED) for bias in (None, BIAS)),
    ("MultiHeadAttention", [X, -X, X], [None, None, None, KEYS, -KEYS], {**HEADED, "outputs": 3}),
    *(
        ("SkipLayerNormalization", [X, skip], weights, {"outputs": outputs})
        for skip in (X[::-1].copy(), X[:1])
        for weights in (ROW[:1], ROW[:2], ROW, [ROW[0], None, ROW[2]])
        for outputs in (1, 4)
    ),
    *(("SkipSimplifiedLayerNormalization", [X, -2 * X], weights, {"outputs": 4}) for weights in (ROW[:1], ROW[:2])),
    *(
        ("FusedMatMul", [X, X], [], {"alpha": 0.5, "transA": left, "transB": 1 - left})
        for left in (0, 1)
    ),
    ("FusedMatMul", [X], [random(WIDTH, 5)], {}),
    *(
        ("FusedMatMul", [random(3, 3, 3, 3), random(3, 3, 3, 3, seed=1)], [], {f"trans{part}": 1 for part in parts})
        for parts in (["BatchA"], ["BatchB"], ["A", "BatchA"], ["BatchA", "B", "BatchB"])
    ),
    ("FusedMatMul", [random(4, 2, 5), random(2, 5, 3)], [], {"transBatchA": 1}),
    ("Gelu", [X], [], {}),
    ("BiasGelu", [X], ROW[:1], {}),
    ("FastGelu", [X], [], {}),
    ("FastGelu", [X], ROW[:1], {}),
    ("QuickGelu", [X], [], {"alpha": 1.5}),
    ("EmbedLayerNormalization", [np.int32([[1, 2, 0], [3, 3, 1]]), np.int32([[0, 1, 1], [0, 0, 1]])],
     [random(4, 8), random(5, 8), random(2, 8), random(8), random(8, seed=1)],
     {"outputs": 3}),
    *(
        ("FusedConv", [random(1, 2, 5, 5)], [random(3, 2, 3, 3), random(3)], {"activation": name, **options})
        for name, options in (("Relu", {}), ("HardSwish", {}), ("LeakyRelu", {"activation_params": [0.1]}),
                              ("Clip", {"activation_params": [-0.5, 0.5]}),
                              ("HardSigmoid", {"activation_params": [0.3, 0.4]}))
    ),
    ("FusedConv", [random(1, 2, 5, 5)], [random(3, 2, 3, 3), random(3), random(1, 3, 5, 5)],
     {"activation": "Relu", "auto_pad": "SAME_UPPER"}),
    ("FusedGemm", [X[0]], [random(WIDTH, 3), random(3)], {"activation": "Softplus"}),
    ("FusedGemm", [X[0]], [random(WIDTH, 3), random(3)],
     {"activation": "LeakyRelu", "activation_alpha": 0.2, "alpha": 0.5}),
]  # fmt: skip


def model_of(case: Case) -> onnx.ModelProto:
    """A model of one node; a norm's statistics are left out."""
    operator, inputs, constants, options = case
    model = node_model(operator, inputs, constants, domain="com.microsoft", **options)
    if operator.startswith("Skip") and len(model.graph.output) == 4:
        del model.graph.output[1:3]
        model.graph.node[0].output[1:3] = ["", ""]
    return model


def test_operators_of_onnxruntime() -> None:
    models = [model_of(case) for case in CASES]
    inputs = [array for _, arrays, _, _ in CASES for array in arrays]
    model = load_model(merged(models), inputs)
    assert model.reference is not None
    names = [f"{case[0]} {place} {case[3]}" for place, case in enumerate(CASES) for _ in models[place].graph.output]
    outputs = run_as_stage(model, inputs)
    for name, actual, right in zip(names, outputs, model.reference.outputs(inputs), strict=True):
        np.testing.assert_allclose(actual, right, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("operator", "inputs", "constants", "options", "reason"),
    [
        ("Attention", [X], [WEIGHT, BIAS, np.ones((BATCH, 1, 8, 8), np.int32)], HEADED, "its mask has the shape"),
        ("Attention", [X], [WEIGHT, BIAS], {**HEADED, "do_rotary": 1}, "its attribute do_rotary"),
        ("MultiHeadAttention", [random(2, 4, 2, 3, 3)], [], HEADED, "is packed into another input"),
        ("MultiHeadAttention", [X, KEYS, KEYS], [ROW[0]], HEADED, r"its bias has the shape \[6\], not \[18\]"),
        ("SkipLayerNormalization", [X, X], ROW[:1], {"outputs": 2}, "its mean and deviation"),
        ("FusedConv", [random(1, 2, 5, 5)], [random(3, 2, 3, 3)], {"activation": "Selu"}, "its activation Selu"),
        ("GroupQueryAttention", [X], [], HEADED, "cannot be imported: com.microsoft.GroupQueryAttention"),
    ],
)  # fmt: skip
def test_forms_that_are_refused(
    operator: str, inputs: list[Any], constants: list[Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelImportError, match=reason):
        load_model(node_model(operator, inputs, constants, domain="com.microsoft", **options))


class Block(nn.Module):
    """One layer of BERT, written so that onnxruntime finds its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(16, 16) for _ in range(4))
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], 2, 8).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.heads(part(x)) for part in (self.query, self.key, self.value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / 8**0.5 + bias
        heads = torch.matmul(scores.softmax(-1), value).permute(0, 2, 1, 3).contiguous()
        x = self.first(self.output(heads.view(x.shape)) + x)
        y: torch.Tensor = self.second(self.narrow(F.gelu(self.wide(x))) + x)
        return y


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(50, 16), nn.Embedding(8, 16), nn.Embedding(2, 16)
        self.norm, self.block = nn.LayerNorm(16), Block()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        bias = (1.0 - mask[:, None, None, :].float()) * -10000.0
        places = self.places(torch.arange(ids.shape[1])[None])
        y: torch.Tensor = self.block(self.norm(self.words(ids) + self.kinds(kinds) + places), bias)
        return y


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "bert.onnx"
    names = ["ids", "mask", "kinds"]
    inputs = (torch.ones(2, 6, dtype=torch.int64),) * 3
    axes = {name: {0: "batch", 1: "length"} for name in names}
    torch.onnx.export(Bert().eval(), inputs, path, dynamo=False, opset_version=14, input_names=names, dynamic_axes=axes)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", ["session", "transformers"])
def test_a_network_that_onnxruntime_optimised(tool: str, bert: Path) -> None:
    optimised = str(bert.with_name(f"{tool}.onnx"))
    if tool == "session":
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = optimised
        onnxruntime.InferenceSession(bert, options, providers=["CPUExecutionProvider"])
    else:
        model = optimizer.optimize_model(str(bert), model_type="bert", num_heads=2, hidden_size=16, opt_level=0)
        model.save_model_to_file(optimised)
    written = {node.op_type for node in onnx.load(optimised).graph.node}
    assert {"BiasGelu"} | ({"Attention", "SkipLayerNormalization"} if tool == "transformers" else set()) <= written
    ids, mask = np.arange(12).reshape(2, 6), np.int64([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert_equal_to_source(load_model(optimised, [ids, mask, 1 - mask]))
