"""Templates: every combination of their choices is a right kernel, and says which choices it was made with."""

import random

import numpy as np
import pytest
import tvm
from hypothesis import given, strategies as st

from schedules.template import (
    CHOICES_ATTRIBUTE,
    Space,
    choices_from,
    text_of,
)
from tests.helpers.schedules.schedule_harness import HOST, normal
from tests.helpers.schedules.template_cases import CASES, TRAITS, template_and_function


def outputs_of(function):
    library = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), target=HOST)
    tensors = [
        tvm.runtime.tensor(normal(seed, *(int(extent) for extent in parameter.shape)))
        for seed, parameter in enumerate(function.params)
    ]
    library["main"](*tensors)
    return tensors[-1].numpy()


@pytest.mark.parametrize("name", sorted(CASES))
def test_choices_change_the_kernel_and_not_its_result(name):
    template, function = template_and_function(name)
    space = template.space(function, TRAITS)
    expected = outputs_of(template.kernel(function, TRAITS, space.default))
    texts = set()
    for choices in random.Random(0).sample(list(space.all_choices()), 6):
        scheduled = template.kernel(function, TRAITS, choices)
        texts.add(scheduled.script())
        assert choices_from(scheduled.attrs[CHOICES_ATTRIBUTE]) == choices
        np.testing.assert_allclose(outputs_of(scheduled), expected, rtol=1e-3, atol=1e-3)
    assert len(texts) == 6


def test_functions_of_other_families_are_left_alone():
    template, _ = template_and_function("conv2d")
    _, function = template_and_function("matmul")
    assert template.space(function, TRAITS) is None
    assert template.rule(function, TRAITS) is None


@given(st.dictionaries(st.sampled_from("abcd"), st.one_of(st.integers(-5, 99), st.sampled_from(["all", "7x4"]))))
def test_choices_as_text_and_back(choices):
    assert choices_from(text_of(choices)) == choices


def test_text_that_is_no_choices():
    with pytest.raises(ValueError, match="'tile' in 'tile' is not NAME=VALUE"):
        choices_from("tile")


def test_a_default_outside_its_space_is_refused():
    with pytest.raises(ValueError, match="a=3"):
        Space({"a": (1, 2)}, {"a": 3})
