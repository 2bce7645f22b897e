"""Templates for CUDA: every choice on offer is a right kernel within a block's limits."""

import random

import numpy as np
import pytest
import tvm

from schedules import machine_of, templates_of
from tests.helpers.schedules.convolutions import convolution, expected, product
from tests.helpers.schedules.emulated_gpu import gpu_target, run_kernels
from tests.helpers.schedules.gpu_kernels import (
    MOST_STATIC_SHARED_BYTES,
    MOST_THREADS,
    cuda,
    cuda_source,
    kernels_of,
    module_of_kernels,
    needs_headers,
)
from tests.helpers.schedules.schedule_harness import assert_close, fuse, graph_of, lower, normal, rules, unscheduled

SM_90 = cuda("sm_90")
GPU = machine_of(SM_90)
IMAGE, WEIGHT, BIAS = normal(0, 1, 32, 9, 9), normal(1, 40, 32, 3, 3), normal(2, 40)
LEFT, RIGHT = normal(0, 50, 300), normal(1, 300, 72)


EXACT_PRODUCT = np.maximum(LEFT.astype("float64") @ RIGHT.astype("float64"), 0)
CASES = {
    "conv2d": (
        convolution(WEIGHT, BIAS, padding=(1, 1)), [IMAGE], expected(IMAGE, WEIGHT, BIAS, padding=(1, 1)), 1e-4,
    ),
    "matmul": (product("float32"), [LEFT, RIGHT], EXACT_PRODUCT, 1e-4),
    "tensor_core": (product("float16"), [LEFT, RIGHT], EXACT_PRODUCT, 1e-3),
}  # fmt: skip


class Chosen:
    """Stands where a database does, and takes given choices for kernels of one template."""

    def __init__(self, name, choices):
        self.name, self.choices = name, choices

    def kernel(self, function, target):
        template = next(candidate for candidate in templates_of(target) if candidate.name == self.name)
        if template.space(function, machine_of(target)) is None:
            return None
        return template.kernel(function, machine_of(target), self.choices)


def template_and_function(name):
    graph, inputs, _, _ = CASES[name]
    template = next(candidate for candidate in templates_of(SM_90) if candidate.name == name)
    functions = unscheduled(graph_of(graph, inputs), SM_90)
    return template, next(function for function in functions if template.space(function, GPU) is not None)


def some_choices(name, count):
    """Return random choices, ``count`` with slices and ``count`` without."""
    template, function = template_and_function(name)
    offered = list(template.space(function, GPU).all_choices())
    kinds = [[choices for choices in offered if (choices["slices"] > 1) == cut] for cut in (False, True)]
    generator = random.Random(0)
    return [choices for kind in kinds for choices in generator.sample(kind, count)]


@pytest.mark.slow
@needs_headers
@pytest.mark.parametrize("name", sorted(CASES))
def test_choices_change_the_kernel_and_not_its_result(name):
    graph, inputs, exact, tolerance = CASES[name]
    target = gpu_target("sm_90")
    sources = set()
    for choices in some_choices(name, 3):
        lowered = lower(graph_of(graph, inputs), target, Chosen(name, choices))
        assert f"{name} (tuned)" in rules(lowered)
        sources.add(module_of_kernels(lowered).script())
        assert_close(run_kernels(lowered, inputs, target), exact, tolerance)
    assert len(sources) == 6


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_offered_fits_a_block(name):
    template, function = template_and_function(name)
    space = template.space(function, GPU)
    part = "warps" if name == "tensor_core" else "registers"
    offered = list(space.all_choices())
    largest = max(offered, key=lambda choices: (np.prod(numbers(choices["tile"])), choices["depth"]))
    widest = max(offered, key=lambda choices: np.prod(numbers(choices["tile"])) / np.prod(numbers(choices[part])))
    for choices in (largest, widest, *some_choices(name, 1)):
        scheduled = template.kernel(function, GPU, choices)
        with SM_90:
            source = cuda_source(
                tvm.compile(tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")}), SM_90)
            )
        kernels = kernels_of(source)
        assert len(kernels) == (2 if choices["slices"] > 1 else 1)
        for kernel in kernels:
            assert kernel.threads <= MOST_THREADS, (choices, kernel)
            assert kernel.shared_bytes <= MOST_STATIC_SHARED_BYTES, (choices, kernel)


def numbers(pair):
    return [int(number) for number in pair.split("x")]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("matmul", {"tile": "64x128", "registers": "2x2"}),  # 2048 threads
        ("matmul", {"tile": "64x128", "registers": "16x16"}),  # 256 sums a thread
        ("tensor_core", {"tile": "64x128", "depth": 64}),  # more shared memory than there is
        ("conv2d", {"slices": 9}),
    ],
)
def test_what_breaks_a_limit_is_not_offered(name, wrong):
    template, function = template_and_function(name)
    space = template.space(function, GPU)
    assert space.contains(space.default)
    assert not space.contains({**space.default, **wrong})


def test_kernels_for_all_gpus_are_equal_before_they_are_scheduled():
    graph, inputs, _, _ = CASES["conv2d"]
    modules = [module_of_kernels(fuse(graph_of(graph, inputs), cuda(arch))) for arch in ("sm_80", "sm_90")]
    tvm.ir.assert_structural_equal(*modules)
