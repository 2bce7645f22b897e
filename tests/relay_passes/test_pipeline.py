"""What the passes of a stage say that they ensure, checked after each of them on relatives of known networks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from tvm import relax

import schedules
import tvm_split
from relay_passes import bound_indices, fold_affine, fold_constants, fold_padding, lift_weights, remove_identities
from relay_passes.ir import bindings_of, is_tensor_constant, main_function, operator_name, require_whole_graph
from relay_passes.pipeline import Schedules, stage_phases
from tests.models import torch_models
from tvm_split.compiler.targets import host_target

Check = Callable[[relax.Function], None]


def values(function: relax.Function) -> list[relax.Expr]:
    return [binding.value for binding in bindings_of(function)]


def no_identities(function: relax.Function) -> None:
    bound = {binding.var.name: binding.value for binding in bindings_of(function)}
    builder = relax.BlockBuilder()
    assert not [value for value in values(function) if remove_identities._simplified(value, bound, builder) is not None]


def bounded_indices(function: relax.Function) -> None:
    for value in values(function):
        if operator_name(value) == "relax.take" and not is_tensor_constant(value.args[1]):
            assert value.attrs.mode != "fast"
        assert operator_name(value) not in bound_indices._BOUNDED or operator_name(value) == "relax.take"


def nothing_small_to_fold(function: relax.Function) -> None:
    assert not [value for value in values(function) if fold_constants.folded(value) is not None]


def no_affine_chains(function: relax.Function) -> None:
    # A chain of a product and one shift is how each is left.
    assert all((chain.scale == 1).all() and len(chain.members) == 2 for chain in remaining_chains(function))


def no_bordered_convolutions(function: relax.Function) -> None:
    borders = {binding.var.name for binding in bindings_of(function) if fold_padding._border(binding.value) is not None}
    convolved = [value for value in values(function) if operator_name(value) == "relax.nn.conv2d"]
    assert not borders & {getattr(value.args[0], "name", "") for value in convolved}


def remaining_chains(function: relax.Function) -> list[fold_affine._Chain]:
    return list(fold_affine._find_chains(function).values())


ENSURED: dict[str, Check] = {
    "RemoveIdentities": no_identities,
    "BoundIndices": bounded_indices,
    "FoldConstants": nothing_small_to_fold,
    "FoldAffine": no_affine_chains,
    "FoldPadding": no_bordered_convolutions,
    "UniqueNames": lambda function: require_whole_graph(tvm.IRModule({"main": function})),
}


def only_kernels(function: relax.Function) -> None:
    assert not {operator_name(value) for value in values(function)} - {"", "relax.call_tir"}


def blocked_convolutions(function: relax.Function) -> None:
    layouts = {str(v.attrs.out_layout) for v in values(function) if operator_name(v) == "relax.nn.conv2d"}
    assert all(layout.endswith("c") for layout in layouts)


AFTER_PHASE: dict[str, Check] = {"layout": blocked_convolutions, "lower": only_kernels, "fuse": only_kernels}


@pytest.mark.parametrize("name", sorted(torch_models.small_models()))
def test_each_pass_ensures_what_it_says(name: str) -> None:
    model = tvm_split.load_model(*torch_models.small_models()[name])
    target = tvm.target.Target(host_target(1))
    checked = set()
    with target:
        made = Schedules(
            schedules.layout_passes(target),
            schedules.legalizations(target),
            lambda module: schedules.apply(module, target),
        )
        module = model.module
        require_whole_graph(module)
        for phase in stage_phases(made):
            for each in phase.passes:
                module = each(module)
                kind = str(getattr(getattr(each, "info", None), "name", ""))
                if kind in ENSURED:
                    ENSURED[kind](main_function(module))
                    checked.add(kind)
            if phase.name in AFTER_PHASE:
                AFTER_PHASE[phase.name](main_function(module))
    assert checked == ENSURED.keys()
    lifted = lift_weights.lift_weights(module)
    large = [
        constant
        for value in values(main_function(lifted.module))
        for constant in getattr(value, "args", ())
        if is_tensor_constant(constant) and constant.value.numpy().nbytes > lift_weights.LARGEST_EMBEDDED_BYTES
    ]
    assert not large
    assert lifted.weights
