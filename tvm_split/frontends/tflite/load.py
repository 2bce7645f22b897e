"""Load TFLite files and bytes (float, half precision, int8) as Models, without TensorFlow."""

from __future__ import annotations

from pathlib import Path

from tvm_split.frontends import ImportRequest
from tvm_split.frontends.channels_first import channels_first
from tvm_split.frontends.dimensions import bound_inputs
from tvm_split.frontends.names import identifier
from tvm_split.frontends.reference import Arranged, InChildProcess
from tvm_split.frontends.tflite.graph import TfliteFile
from tvm_split.frontends.tflite.importer import import_tflite, require_end
from tvm_split.frontends.tflite.names import parts_of
from tvm_split.frontends.tflite.reference import TfliteReference
from tvm_split.model import Model

QUANTIZED_TOLERANCE = 0.05
"""The tolerance for quantised files. LiteRT's own kernels differ in rounding between two steps, and later operators may
amplify one step to several: for one small attention network, LiteRT's results were 0.02 of their range apart."""


def load_tflite(source: str | Path | bytes, request: ImportRequest) -> Model:
    """Return a Model of a TFLite file's main graph.

    ``example_inputs`` (a sequence, a dict by input name, or one array) is optional. Inputs and outputs are in the
    file's order, with the names of its signature. Layers have their names in Keras, taken from the converter's names of
    tensors. Raises ModelImportError.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        name, shown, content = request.name or path.stem, repr(str(path)), path.read_bytes()
    else:
        name, shown, content = request.name or "model", f"a model of {len(source)} bytes", bytes(source)
    file = TfliteFile(content, shown)
    specs = file.specs()
    shapes, examples = bound_inputs(specs, request)
    require_end(file.operators, parts_of(file.operators, file.weights()))
    graph = file.bound(shapes)
    built, orders = channels_first(import_tflite(graph, parts_of(graph.operators, graph.weights)))
    reference = TfliteReference(
        file.content,
        dict(zip(graph.inputs, shapes, strict=True)),
        [number for number, _ in graph.outputs],
        {int(key): variable for key, variable in built.held.items()},
    )
    return Model(
        identifier(name), "tflite", built.module, built.inputs, built.outputs([output for _, output in graph.outputs]),
        built.layers, Arranged(InChildProcess(reference), orders), None if examples is None else tuple(examples),
        QUANTIZED_TOLERANCE if graph.is_quantized else None,
    )  # fmt: skip
