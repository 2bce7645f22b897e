"""Each pass of a stage leaves nothing that it would change, and each phase brings small networks into its form."""

import pytest
import tvm
import tvm_ffi
from tvm import relax

import schedules
import tvm_split
from relay_passes.ir import bindings_of, is_tensor_constant, main_function, operator_name, require_whole_graph
from relay_passes.lift_weights import LARGEST_EMBEDDED_BYTES, lift_weights
from relay_passes.pipeline import stage_phases
from tests.models import torch_models
from tvm_split.compiler.targets import host_target

OWN_PASSES = {"RemoveIdentities", "BoundIndices", "FoldConstants", "FoldAffine", "FoldPadding", "UniqueNames"}


def values(module: tvm.IRModule) -> list[relax.Expr]:
    return [binding.value for binding in bindings_of(main_function(module))]


def require_form(phase: str, module: tvm.IRModule) -> None:
    if phase == "layout":
        layouts = {str(v.attrs.out_layout) for v in values(module) if operator_name(v) == "relax.nn.conv2d"}
        assert all(layout.endswith("c") for layout in layouts)
    if phase in ("lower", "fuse"):
        assert not {operator_name(value) for value in values(module)} - {"", "relax.call_tir"}


@pytest.mark.parametrize("name", sorted(torch_models.small_models()))
def test_passes_and_phases_ensure_their_forms(name: str) -> None:
    module = tvm_split.load_model(*torch_models.small_models()[name]).module
    require_whole_graph(module)
    target = tvm.target.Target(host_target(1))
    checked = set()
    with target:
        phases = stage_phases(
            schedules.layout_passes(target),
            schedules.legalizations(target),
            lambda module: schedules.apply(module, target),
        )
        for phase, passes in phases.items():
            for run_pass in passes:
                module = run_pass(module)
                kind = str(getattr(getattr(run_pass, "info", None), "name", ""))
                if kind in OWN_PASSES:
                    assert tvm_ffi.structural_equal(run_pass(module), module), kind
                    checked.add(kind)
                if kind == "UniqueNames":
                    require_whole_graph(module)
            require_form(phase, module)
    assert checked == OWN_PASSES
    lifted, lifted_weights = lift_weights(module)
    constants = [
        argument for value in values(lifted) for argument in getattr(value, "args", ()) if is_tensor_constant(argument)
    ]
    assert all(constant.value.numpy().nbytes <= LARGEST_EMBEDDED_BYTES for constant in constants)
    assert lifted_weights
