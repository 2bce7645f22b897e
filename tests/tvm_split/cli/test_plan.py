import pytest

LAYERS = ["conv_1", "relu_1", "conv_2", "flatten", "dense"]


def test_plan_as_json(invoke_json, onnx_path):
    content = invoke_json("plan", onnx_path, "--split", "machine-a=conv_1,relu_1", "--split", "machine-b=conv_2")
    assert content["model"] == "small"
    assert content["inputs"] == [{"name": "image", "shape": [2, 3, 6, 6], "dtype": "float32"}]
    assert [stage["machine"] for stage in content["stages"]] == ["machine-a", "machine-b"]
    assert [stage["layers"] for stage in content["stages"]] == [LAYERS[:2], LAYERS[2:]]
    assert content["prediction"] is None
    assert sum(stage["estimated_share"] for stage in content["stages"]) == pytest.approx(1.0)


def test_layers(invoke, invoke_json, onnx_path):
    assert invoke("plan", onnx_path, "--layers").stdout.split() == LAYERS
    assert invoke_json("plan", onnx_path, "--layers")["layers"] == LAYERS


def test_annotations_of_an_onnx_file(invoke, invoke_json, onnx_path, tmp_path):
    annotated = tmp_path / "annotated.onnx"
    split = ["--split", "machine-a=conv_1", "--split", "machine-b=relu_1"]
    written = invoke_json("plan", onnx_path, *split, "--write-annotations", annotated)
    content = invoke_json("plan", annotated, "--split", "source")
    assert content["plan"]["stages"] == written["plan"]["stages"]
    chosen = invoke_json("plan", annotated, "--split", "source:tvm-split")
    assert chosen["stages"] == content["stages"]
    compiled = invoke_json("compile", annotated, "--split", "source", "--output", tmp_path / "bundle", "--no-verify")
    assert [stage["layers"] for stage in compiled["stages"]] == [["conv_1"], LAYERS[1:]]
    for options, message in (
        (["--split", "source", *split], "--split: 'source' is not MACHINE=LAYER,LAYER"),
        (["--split", "source:mine"], "'mine'; it has 'tvm-split'"),
        (["--split", "source", "--workers", "1"], "machine-b"),
    ):
        assert message in invoke("plan", annotated, *options, code=2).stderr
    assert "says nothing of a split" in invoke("plan", onnx_path, "--split", "source", code=2).stderr


def test_annotations_need_an_onnx_file(invoke, tmp_path):
    options = ("--write-annotations", tmp_path / "out.onnx")
    assert "only ONNX files" in invoke("plan", "network:make", *options, code=2).stderr


def test_model_from_a_python_function(invoke_json, tmp_path, monkeypatch):
    (tmp_path / "my_network.py").write_text(
        "import torch\n"
        "def with_examples():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout()), (torch.zeros(2, 4),)\n"
        "class Alone(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    assert invoke_json("plan", "my_network:with_examples", "--workers", "1")["inputs"][0]["shape"] == [2, 4]
    content = invoke_json("plan", "my_network:Alone", "--workers", "1", "--input-shape", "7,4")
    assert content["outputs"][0]["shape"] == [7, 3]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("missing.onnx", "missing.onnx"),
        ("model.pth", "MODULE:NAME"),
        ("no_such_module:network", "no_such_module"),
        ("json:no_such_name", "no_such_name"),
        ("nets.py:cnn", "give the module, without its ending: nets:cnn"),
        ("json:loads", "'json:loads' cannot be called without arguments (missing a required argument: 's'): name an"),
        ("torch.nn:Identity", "--input-shape: Identity is a torch module: give the shape of each input"),
        ("torch.nn:Linear", "such as `def network(): return Linear(…)`"),
    ],
)
def test_a_model_that_is_not_there(invoke, model, message):
    assert message in invoke("plan", model, code=2).stderr
