"""Checks that a Model keeps the promises of ``tvm_split.model.Model``."""

import keyword

from tvm import relax

from tvm_split.model import Model


def assert_keeps_contract(model: Model) -> None:
    """One function, one dataflow block, static shapes, one call a binding, unique names with layers, nothing dead."""
    assert [variable.name_hint for variable in model.module.get_global_vars()] == ["main"]
    function = model.module["main"]
    assert len(function.body.blocks) <= 1
    bindings = [binding for block in function.body.blocks for binding in block.bindings]
    names = [binding.var.name for binding in bindings]
    assert len(set(names)) == len(names)
    assert set(names) == set(model.layers)
    assert not set(names) & {parameter.name for parameter in function.params}
    for binding in bindings:
        assert binding.var.name.isidentifier()
        assert not keyword.iskeyword(binding.var.name)
        value = binding.value
        assert isinstance(value, relax.Call | relax.TupleGetItem), binding
        if isinstance(value, relax.Call):
            assert not any(isinstance(argument, relax.Call) for argument in value.args), binding
    used = {v.name for binding in bindings for v in relax.analysis.free_vars(binding.value)}
    used |= {v.name for v in relax.analysis.free_vars(function.body.body)}
    assert set(names) <= used
    assert isinstance(function.body.body, relax.Tuple)
    assert [parameter.name for parameter in function.params] == [spec.name for spec in model.inputs]
    for spec, parameter in zip(model.inputs, function.params, strict=True):
        assert spec.shape == tuple(int(size) for size in parameter.ty.shape)
        assert spec.dtype == str(parameter.ty.dtype)
    for spec, field in zip(model.outputs, function.body.body.fields, strict=True):
        assert spec.shape == tuple(int(size) for size in field.ty.shape)
        assert spec.dtype == str(field.ty.dtype)
