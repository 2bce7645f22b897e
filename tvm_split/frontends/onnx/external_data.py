"""Read ONNX files whose weights are in other files, through links where these are safe."""

from pathlib import Path

import onnx
from onnx.external_data_helper import load_external_data_for_model, load_external_data_for_tensor

from tvm_split.errors import ModelImportError
from tvm_split.frontends.files import require_weights


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model in a file with its weights. Raises ModelImportError for weights that must not be read."""
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _load(tensor, path)
    load_external_data_for_model(model, str(path.parent))  # weights of other places, such as attributes
    return model


def _load(tensor: onnx.TensorProto, path: Path) -> None:
    """Read a weight in place.

    A model may name any path, and may come with links. So only files below its folder are read, and, for caches that
    keep files in one folder and link to them, files directly beside the file that the model's own path links to.
    """
    location = next((entry for entry in tensor.external_data if entry.key == "location"), None)
    if location is None:
        raise ModelImportError(f"weight {tensor.name!r} of {str(path)!r} is in another file that it does not name")
    folder, real_folder = path.parent.resolve(), path.resolve().parent
    file = (folder / location.value).resolve()
    shown = f"{str(path)!r} keeps weight {tensor.name!r} in {location.value!r}, which"
    if not file.is_relative_to(folder):
        if file.parent != real_folder:
            raise ModelImportError(f"{shown} leads out of the model's folder: put the file itself next to the model")
        folder = real_folder
    if not file.is_file():
        raise ModelImportError(f"{shown} is not there: put that file next to the model")
    if file.stat().st_nlink > 1:
        raise ModelImportError(
            f"{shown} has several names (hard links), so that it may be any file: make it a file of its own, "
            "cp FILE COPY && mv COPY FILE"
        )
    require_weights(file)
    location.value = str(file.relative_to(folder))
    load_external_data_for_tensor(tensor, str(folder))
