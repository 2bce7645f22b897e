"""Build a Model from a StableHLO module with static sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvm_split.frontends.channels_first import channels_first
from tvm_split.frontends.normal_form import identifier, normal_form
from tvm_split.frontends.reference import Arranged, InChildProcess
from tvm_split.frontends.stablehlo.adapter import import_program
from tvm_split.frontends.stablehlo.flattening import flattened
from tvm_split.frontends.stablehlo.layer_names import Naming, as_they_are
from tvm_split.frontends.stablehlo.modules import Array, bytecode
from tvm_split.model import Model

if TYPE_CHECKING:
    from jaxlib.mlir import ir


def model_of(
    module: ir.Module,
    weights: Mapping[int, Array],
    inputs: Mapping[int, str],
    examples: Sequence[Any] | None,
    *,
    framework: str,
    name: str,
    naming: Naming = as_they_are,
) -> Model:
    """Return a Model of ``module``; arguments of its main function are ``weights`` or named ``inputs``, by position.

    ``naming`` converts paths of operations to names of layers. Raises ModelImportError.
    """
    from tvm_split.frontends.stablehlo.reference import StableHloReference

    program = flattened(module, weights, naming)
    found = channels_first(import_program(program, inputs))
    form = normal_form(found.imported.function, found.imported.layers, list(inputs.values()))
    variables = form.variables(found.imported.held)
    reference = StableHloReference(
        bytecode(module),
        bytecode(program.module),
        weights,
        tuple(inputs),
        variables,
    )
    arranged = Arranged(InChildProcess(reference), found.named(variables))
    arrays = None if examples is None else tuple(examples)
    return Model(identifier(name), framework, form.module, form.inputs, form.outputs(), form.layers, arranged, arrays)
