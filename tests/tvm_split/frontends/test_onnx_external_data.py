"""Weights in other files: links as caches make them, links that lead elsewhere, and more than a protobuf holds."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.helpers.frontends.comparison import run
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model

X = np.float32([[1, -2, 3]])
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def save(folder: Path, location: str = "model.onnx_data") -> Path:
    """Write a product by a weight in another file."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in (("x", 3), ("y", 4))]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:])
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=WEIGHT.shape, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    graph.initializer.append(weight)
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=9).SerializeToString())
    return path


def cached(root: Path) -> Path:
    """Write the model as the cache of Hugging Face does: links of a snapshot into one folder of files."""
    path = save(root / "snapshots" / "5f3a" / "onnx")
    data = path.with_name("model.onnx_data")
    data.write_bytes(WEIGHT.tobytes())
    (root / "blobs").mkdir()
    for file in (path, data):
        blob = root / "blobs" / f"blob_of_{file.name}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    return path


def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    model = load_model(cached(tmp_path / "models--net"))
    np.testing.assert_array_equal(run(model, [X])[0], X @ WEIGHT)
    np.testing.assert_array_equal(model.reference.outputs([X])[0], X @ WEIGHT)


def test_a_folder_and_files_of_it_may_be_links(tmp_path: Path) -> None:
    path = save(tmp_path / "real", "parts/w.bin")
    (path.parent / "stored").mkdir()
    (path.parent / "stored" / "w").write_bytes(WEIGHT.tobytes())
    (path.parent / "parts").mkdir()
    (path.parent / "parts" / "w.bin").symlink_to("../stored/w")
    (tmp_path / "link").symlink_to("real")
    np.testing.assert_array_equal(run(load_model(tmp_path / "link" / "model.onnx"), [X])[0], X @ WEIGHT)


@pytest.mark.parametrize("way", ["absolute", "above", "link", "linked folder", "link beside a real model"])
def test_a_model_reads_no_file_of_another_folder(way: str, tmp_path: Path) -> None:
    secret = tmp_path / "home" / "secret"
    secret.parent.mkdir()
    secret.write_bytes(WEIGHT.tobytes())
    locations = {"absolute": str(secret), "above": "../home/secret", "linked folder": "parts/secret"}
    path = save(tmp_path / "net", locations.get(way, "w.bin"))
    if way == "link beside a real model":  # the model's path links into a folder that does not hold the secret itself
        path.rename(tmp_path / "model.onnx")
        path.symlink_to("../model.onnx")
    if way.startswith("link "):
        path.with_name("w.bin").symlink_to("../home/secret")
    if way == "linked folder":
        path.with_name("parts").symlink_to("../home")
    if way == "link":
        path.with_name("w.bin").symlink_to(secret)
    with pytest.raises(ModelImportError, match=r"'w' in .* leads out of the model's folder: put the file itself next"):
        load_model(path)


def test_other_faults_of_the_file_of_weights_are_said(tmp_path: Path) -> None:
    path = save(tmp_path / "net")
    data = path.with_name("model.onnx_data")
    with pytest.raises(ModelImportError, match="is not there: put that file next to the model"):
        load_model(path)
    data.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelImportError, match="onnx_data' is a Git LFS pointer"):
        load_model(path)
    (tmp_path / "other").write_bytes(WEIGHT.tobytes())
    data.unlink()
    data.hardlink_to(tmp_path / "other")
    with pytest.raises(ModelImportError, match=r"has several names \(hard links\).*cp FILE COPY && mv COPY FILE"):
        load_model(path)
    data.unlink()
    data.write_bytes(WEIGHT.tobytes()[:20])
    with pytest.raises(ModelImportError, match="weight 'w' is damaged"):
        load_model(path)


@pytest.mark.long
def test_weights_of_more_than_two_gibibytes(tmp_path: Path) -> None:
    """The weights are the same zeros of a sparse file, nine times, and one more that is read."""
    path = save(tmp_path)
    path.with_name("model.onnx_data").write_bytes(WEIGHT.tobytes())
    model = onnx.load(path, load_external_data=False)
    size = 1 << 28
    with (tmp_path / "zeros").open("wb") as file:
        file.truncate(size)
    for place in range(9):
        weight = model.graph.initializer.add(name=f"zeros_{place}", data_type=TensorProto.INT8, dims=[size])
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="zeros")
    path.write_bytes(model.SerializeToString())
    np.testing.assert_array_equal(load_model(path).reference.outputs([X])[0], X @ WEIGHT)
