"""``tvm-split bench``; what it computes is tested in tests/tvm_split/deployment/test_benchmark.py."""

import numpy as np

from tests.models.small_onnx_model import INPUT_SHAPE


def test_as_json(invoke_json, bundle, tmp_path):
    np.savez(tmp_path / "images.npz", image=np.zeros((2, *INPUT_SHAPE), np.float32))
    options = ("--cluster", "in-process", "--rounds", "2", "--micro-batches", "5")
    report = invoke_json("bench", bundle, *options, "--inputs", tmp_path / "images.npz")
    assert (report["runs"], report["streamed"], report["rounds"]) == (10, 10, 2)
    assert [machine["stages"] for machine in report["machines"]] == [["stage_0"], ["stage_1"]]
    assert report["period_seconds"]["predicted"] is None
    assert report["latency_seconds"]["measured"] > 0
    assert report["inputs"] == str(tmp_path / "images.npz")
