import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from tests.models.small_onnx_model import small_model
from tvm_split.cli.application import app


@pytest.fixture
def invoke():
    """Run a command in this process; a failure that the test does not expect shows the output."""

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == code, result.stdout + result.stderr
        return result

    return run


@pytest.fixture
def invoke_json(invoke):
    return lambda *arguments, code=0: json.loads(invoke(*arguments, "--json", code=code).stdout)


@pytest.fixture(scope="session")
def onnx_path(tmp_path_factory) -> Path:
    """A network of two convolutions and a fully connected layer, whose nodes have names."""
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(small_model(), path)
    return path


@pytest.fixture(scope="session")
def bundle(onnx_path, tmp_path_factory) -> Path:
    """Compile the network for two machines on this host."""
    folder = tmp_path_factory.mktemp("compiled") / "bundle"
    split = ["--split", "machine-a=conv_1,relu_1", "--split", "machine-b=conv_2,flatten,dense"]
    result = CliRunner().invoke(app, ["compile", str(onnx_path), "--output", str(folder), *split])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def expected_outputs(onnx_path):
    """Return ONNX's own outputs for inputs of shape (micro-batches, *INPUT_SHAPE)."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(onnx_path))
    return lambda batches: np.stack([evaluator.run(None, {"image": batch})[0] for batch in batches])


@pytest.fixture
def start_process(request):
    """Start ``tvm-split`` as a process of its own; it is killed if the test leaves it running."""

    def start(*arguments, **options):
        command = [sys.executable, "-c", "from tvm_split.__main__ import main; main()", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **{**pipes, **options})

        def end():
            if process.poll() is None:
                process.kill()
            process.communicate()

        request.addfinalizer(end)
        return process

    return start
