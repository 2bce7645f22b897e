"""Views of models, bundles, tuning reports and worker kits."""

import dataclasses
from typing import Any

from rich.text import Text

from schedules.tuning import KernelResult
from tvm_split.compiler.bundle import Bundle, Verified, kernels_key
from tvm_split.compiler.targets import runs_here
from tvm_split.display.view import Row, Table, View, as_json, view
from tvm_split.model import Model
from tvm_split.tuning import TuningReport
from tvm_split.units import bytes_text, count_text, seconds_text, short_list
from tvm_split.worker_kit.kit import WorkerKit


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


@as_json.register
def tuning_as_json(report: TuningReport) -> dict[str, Any]:
    """Return the tuning report with its totals and the gain of each kernel, as JSON values."""
    return {
        **dataclasses.asdict(report),
        "database": str(report.database),
        "default_seconds": report.default_seconds,
        "tuned_seconds": report.tuned_seconds,
        "kernels": [{**dataclasses.asdict(kernel), "gain": kernel.gain} for kernel in report.kernels],
    }


@view.register
def view_of_tuning(report: TuningReport, *, details: bool = False) -> View:
    """Return a table with a row for each kernel, and their total time."""
    numbers = ("calls", "share", "default", "tuned", "gain", "trials")
    rows = list(map(_kernel_row, report.kernels))
    if report.fixed_seconds:
        share = report.fixed_seconds / report.default_seconds
        rows.append(("kernels without choices, all calls", "", f"{share:.1%}", _time(report.fixed_seconds), "", "", ""))
    unmeasured = (
        f", without {count_text(report.unmeasured, 'kernel')} that could not be measured" if report.unmeasured else ""
    )
    return [
        Table(f"{report.model}: kernels", ("kernel, template, choices",), numbers, rows),
        f"all of them, one run of the model: {report.default_seconds * 1e3:.3f} ms by default, "
        f"{report.tuned_seconds * 1e3:.3f} ms tuned{unmeasured}; records are in {report.database}",
    ]


def _kernel_row(kernel: KernelResult) -> Row:
    return (
        Text(f"{kernel.name}\n  ").append(f"{kernel.template}: {kernel.choices}", "dim"),
        str(kernel.count),
        f"{kernel.share:.1%}",
        _time(kernel.default_seconds),
        _time(kernel.tuned_seconds) if kernel.kept else "default",
        f"{kernel.gain:.2f}" if kernel.kept else "",
        f"{kernel.trials}" + (f" ({kernel.failures} failed)" if kernel.failures else ""),
    )


def _time(seconds: float | None) -> str:
    return "failed" if seconds is None else seconds_text(seconds)


@as_json.register
def kit_as_json(kit: WorkerKit) -> dict[str, Any]:
    """Return the kit, its platform and its packages as JSON values."""
    return {
        "output": str(kit.path),
        "device": kit.device,
        "architecture": kit.platform.architecture,
        "python": ".".join(map(str, kit.platform.python)),
        "glibc": f"2.{kit.glibc_minor}",
        "size_bytes": kit.size_bytes,
        "packed_bytes": kit.packed_bytes,
        "parts": [
            {"name": part.name, "version": part.version, "files": part.files, "size_bytes": part.size_bytes}
            for part in kit.parts
        ],
    }


@view.register
def view_of_kit(kit: WorkerKit, *, details: bool = False) -> View:
    """Return the packages of the kit, the largest first."""
    largest_first = sorted(kit.parts, key=lambda part: -part.size_bytes)
    rows = [(part.name, part.version, str(part.files), bytes_text(part.size_bytes)) for part in largest_first]
    rows.append(("all", "", str(sum(part.files for part in kit.parts)), bytes_text(kit.size_bytes)))
    python = ".".join(map(str, kit.platform.python))
    title = f"{kit.path.name}: a worker for {kit.device} on {kit.platform.architecture}, Python {python}"
    packed = "" if kit.packed_bytes is None else f"packed: {bytes_text(kit.packed_bytes)}; "
    caption = f"{packed}needs Linux with glibc 2.{kit.glibc_minor} or newer"
    return [Table(title, ("package", "version"), ("files", "size"), rows, caption)]


@view.register
def view_of_model(model: Model, *, details: bool = False) -> View:
    """Return a model's inputs, outputs and number of layers."""
    tensors = [("input", tensor) for tensor in model.inputs] + [("output", output) for output in model.outputs]
    rows = [(kind, tensor.name, tensor.dtype, " × ".join(map(str, tensor.shape))) for kind, tensor in tensors]
    title = f"{model.name}: {count_text(len(model.layer_names), 'layer')}, from {model.framework}"
    return [Table(title, ("", "tensor", "dtype", "shape"), (), rows)]
