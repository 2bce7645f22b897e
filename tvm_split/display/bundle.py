"""Views of models and bundles."""

import dataclasses
from typing import Any

from tvm_split.compiler.bundle import Bundle, Verified, kernels_key
from tvm_split.compiler.targets import runs_here
from tvm_split.display.view import Table, View, as_json, view
from tvm_split.model import Model
from tvm_split.units import bytes_text, count_text, short_list


@view.register
def view_of_model(model: Model, *, details: bool = False) -> View:
    """Return a model's inputs, outputs and number of layers."""
    tensors = [("input", tensor) for tensor in model.inputs] + [("output", output) for output in model.outputs]
    rows = [(kind, tensor.name, tensor.dtype, " × ".join(map(str, tensor.shape))) for kind, tensor in tensors]
    title = f"{model.name}: {count_text(len(model.layer_names), 'layer')}, from {model.framework}"
    return [Table(title, ("", "tensor", "dtype", "shape"), (), rows)]


@as_json.register
def bundle_as_json(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle's stages, sizes and verification as JSON values."""
    return {
        "model": bundle.model,
        "digest": bundle.digest,
        "verified": bundle.verified.value,
        "output_error": bundle.output_error,
        "precision": bundle.plan.precision,
        "stages": [
            {
                "name": stage.name,
                "machine": stage.machine,
                "target": dict(bundle.plan.machine(stage.machine).target),
                "layers": stage.layers,
                "library_bytes": stage.library.size_bytes,
                "weight_bytes": sum(weight.blob.size_bytes for weight in stage.weights),
                "cuda": dataclasses.asdict(needs) if (needs := bundle.cuda.get(kernels_key(stage))) else None,
                "kernels": sorted({kernel.function for kernel in bundle.kernels.get(kernels_key(stage), ())}),
            }
            for stage in bundle.program.stages
        ],
    }


@view.register
def view_of_bundle(bundle: Bundle, *, details: bool = False) -> View:
    """Return the compiled stages and their comparison with the source framework; with ``details``, the kernels."""
    stages = bundle_as_json(bundle)["stages"]
    texts = ("stage", "machine", "kernels") if details else ("stage", "machine")
    rows = [
        (
            *(stage["name"], stage["machine"]),
            *["\n".join(stage["kernels"])] * details,
            *(bytes_text(stage["library_bytes"]), bytes_text(stage["weight_bytes"])),
        )
        for stage in stages
    ]
    caption = "a kernel that is named after several operators is one fused kernel" if details else ""
    difference = (
        "" if bundle.output_error is None else f"; outputs differ by {bundle.output_error:.1e} of the largest at most"
    )
    sources = [name for name, needs in bundle.cuda.items() if needs.toolkit is None]
    missing = (
        f"no nvcc was found: the kernels of {short_list(sources)} are source, and their workers need an nvcc "
        "(pip install 'tvm-split[cuda]')"
    )
    return [
        Table(f"{bundle.model}: compiled stages", texts, ("library", "weights"), rows, caption),
        f"compared with the source framework: {_verified_words(bundle)}{difference}",
        *[missing] * bool(sources),
    ]


def _verified_words(bundle: Bundle) -> str:
    if bundle.verified is not Verified.COMPILED_AGAIN:
        return bundle.verified.value
    foreign = [
        f"{stage.name} of {stage.machine}"
        for stage in bundle.program.stages
        if not runs_here(bundle.plan.machine(stage.machine).target)
    ]
    return (
        f"{bundle.verified.value}; the code that {', '.join(foreign)} will execute cannot run here and has not been run"
    )
