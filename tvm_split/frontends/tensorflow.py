"""Load TensorFlow's SavedModel folders as Models, through StableHLO that TensorFlow exports."""

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tvm_split.errors import ModelImportError, last_line
from tvm_split.frontends import ImportRequest
from tvm_split.frontends.building import with_output_names
from tvm_split.frontends.dimensions import bound_inputs
from tvm_split.frontends.names import identifier, scopes_of_keras
from tvm_split.frontends.stablehlo.importer import model_of
from tvm_split.frontends.stablehlo.modules import block_of, main_of, parsed
from tvm_split.model import Model

SIGNATURE = "serving_default"


def load_tensorflow(source: str | Path, request: ImportRequest) -> Model:
    """Return a Model of a SavedModel's signature ``serving_default``, or of its only signature.

    ``example_inputs`` (a sequence, a dict by input name, or one array) may be left out where ``batch`` and
    ``dimensions`` bind all open sizes. Layers are named by TensorFlow's scopes; outputs are sorted by name, as in
    TensorFlow. Raises ModelImportError.
    """
    path = Path(source)
    function, output_names = _signature(path)
    specs = [
        (tensor.name.partition(":")[0], list(tensor.shape), tensor.dtype.as_numpy_dtype.__name__)
        for tensor in function.inputs
    ]
    shapes, examples = bound_inputs(specs, request)
    zeros = [tf.zeros(shape, tensor.dtype) for shape, tensor in zip(shapes, function.inputs, strict=True)]
    compiled = tf.function(lambda *tensors: function(*tensors), jit_compile=True)
    try:
        code = compiled.experimental_get_compiler_ir(*zeros)(stage="stablehlo_serialized")
    except Exception as error:
        raise ModelImportError(f"TensorFlow cannot compile {str(path)!r} with XLA: {last_line(error)}") from error
    module = parsed(code, f"what TensorFlow makes of {str(path)!r}")
    count = len(list(block_of(main_of(module)).arguments))
    if count != len(specs):
        raise ModelImportError(
            f"{str(path)!r} takes {len(specs)} inputs, compiled it takes {count}; inputs that nothing is computed of "
            "cannot be imported"
        )
    inputs = {place: identifier(input_name) for place, (input_name, _, _) in enumerate(specs)}
    name = request.name or path.name
    model = model_of(module, {}, inputs, examples, framework="tensorflow", name=name, naming=scopes_of_keras)
    return with_output_names(model, output_names) if len(output_names) == len(model.outputs) else model


def _signature(path: Path) -> tuple[Any, list[str]]:
    """Return the function of a SavedModel's signature with its variables as constants, and its outputs' names."""
    try:
        loaded = tf.saved_model.load(str(path))  # this reference keeps its variables alive for its functions
    except Exception as error:
        raise ModelImportError(f"{str(path)!r} cannot be read as a SavedModel: {last_line(error)}") from error
    signatures = loaded.signatures
    function = signatures.get(SIGNATURE) or (next(iter(signatures.values())) if len(signatures) == 1 else None)
    if function is None:
        raise ModelImportError(
            f"{str(path)!r} has the signatures {', '.join(signatures) or '(none)'}: call the network's {SIGNATURE}"
        )
    # Loops stay functional: XLA does not support the lowered form that TensorFlow makes by default.
    return convert_variables_to_constants_v2(function, lower_control_flow=False), sorted(function.structured_outputs)
