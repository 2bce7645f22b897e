"""Files with the suffix of a model that are something else are refused with what they are and what to do."""

import gzip
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from tvm_split.errors import ModelImportError
from tvm_split.frontends import FRONTENDS, load_model
from tvm_split.frontends.files import require_model_file, require_weights

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 97\n"
SUFFIXES = [suffix for _, frontend in FRONTENDS.items() for suffix in frontend.suffixes]


def write_safetensors(path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def write_old_checkpoint(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def write_zip(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__)


KINDS = {
    "empty": (lambda path: path.write_bytes(b""), "is empty: download"),
    "lfs": (lambda path: path.write_text(POINTER), "Git LFS pointer.*git lfs pull"),
    "page": (lambda path: path.write_text("\n<!DOCTYPE html>\n<html></html>"), "a web page: download the file itself"),
    "safetensors": (write_safetensors, "a safetensors checkpoint; it has weights without a graph"),
    "checkpoint": (lambda path: torch.save({"w": torch.ones(2)}, path), "checkpoint of torch.save; it has weights"),
    "old checkpoint": (write_old_checkpoint, "a Python pickle.* it has weights without a graph"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(b"model")), "compressed.*: unpack it, and give the path"),
    "json": (lambda path: path.write_text('\n{"graph": []}'), "a JSON document.*give the model's own file"),
    "list": (lambda path: path.write_text("[1, 2]"), "a JSON document"),
    "tar": (write_tar, "archive: unpack it"),
    "zip": (lambda path: write_zip(path, "models/model.onnx"), "a zip archive: unpack it"),
    "damaged zip": (lambda path: path.write_bytes(b"PK\x03\x04 cut off"), "a damaged zip archive: download"),
    "torchscript": (
        lambda path: write_zip(path, "m/data.pkl", "m/code/__torch__.py"),
        "a TorchScript archive.* in torch",
    ),
    "hdf5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n\0\0"), r"an HDF5 file: .*\.keras"),
    "folder": (lambda path: path.mkdir(), "is a folder, not a file"),
    "pipe": (lambda path: os.mkfifo(path), "is a pipe, socket or device"),
}


@pytest.mark.parametrize("suffix", sorted({".onnx", ".pt2", ".mlir", ".jax", ".keras", ".tflite"} & set(SUFFIXES)))
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_holds_no_network_is_named_by_what_it_is(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    write, message = KINDS[kind]
    write(path)
    with pytest.raises(ModelImportError, match=f"model\\{suffix}' is .*") as error:
        load_model(path)
    assert error.match(message)
    assert "\n" not in str(error.value)


def test_files_of_networks_pass(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2).eval()
    torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), tmp_path / "model.pt2")
    write_zip(tmp_path / "model.keras", "config.json")
    for path in tmp_path.iterdir():
        require_model_file(path)


def test_an_archive_with_the_suffix_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(1, 2),)), path)
    with pytest.raises(ModelImportError, match=r"an archive of the kind \.pt2: give it this suffix"):
        load_model(path)


def test_the_starts_of_models_are_no_other_kind(tmp_path: Path) -> None:
    """A flatbuffer has the offset of its table first, a protobuf of ONNX the IR's version, bytecode of MLIR a name."""
    path = tmp_path / "model"
    for head in (
        bytes((8, 10)),
        b"ML\xefR",
        b"module @m {",
        *(size.to_bytes(4, "little") for size in range(4, 1024, 4)),
    ):
        path.write_bytes(head + b"TFL3" + bytes(24))
        require_model_file(path)


@pytest.mark.parametrize("head", [b"PK\x03\x04", b"{", b"\x1f\x8b\x08", b"\x80\x02}"])
def test_weights_may_look_like_any_other_kind(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(head + bytes(600))
    require_weights(path)
