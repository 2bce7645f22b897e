"""Networks compiled for CUDA without a GPU: every kernel bound to threads, within a block's limits, by a fast rule.

The networks have the published widths, and one layer of each kind; long tests compile all of them whole.
"""

import numpy as np
import pytest
import torch
import tvm
from tvm import tirx

import schedules
import tvm_split
from tests.helpers.schedules.convolutions import convolution, product
from tests.helpers.schedules.gpu_kernels import (
    MOST_STATIC_SHARED_BYTES,
    MOST_THREADS,
    compile_with_nvcc,
    cuda,
    cuda_source,
    kernels_of,
    module_of_kernels,
    nvcc,
    plan_for_a_gpu,
    slow,
)
from tests.helpers.schedules.schedule_harness import graph_of, lower, normal
from tests.models import torch_models
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.stage import StageCompiler

TOKENS = torch.zeros(1, 128, dtype=torch.int64)
IMAGE = torch.zeros(1, 3, 224, 224)
MODELS = {
    "resnet": (lambda: torch_models.resnet((1, 1, 1, 1), 64, 1000), (IMAGE,)),
    "vgg": (lambda: torch_models.vgg([64, 64, "M", 128, "M", 256, "M", 512, "M", 512, "M"], 512, 7, 1000), (IMAGE,)),
    "mobilenet": (
        lambda: torch_models.mobilenet(
            32,
            [(1, 16, 1, 1), (6, 24, 1, 2), (6, 32, 1, 2), (6, 64, 1, 2), (6, 96, 1, 1), (6, 160, 1, 2), (6, 320, 1, 1)],
            1280,
            1000,
        ),
        (IMAGE,),
    ),
    "vit": (lambda: torch_models.vit(224, 16, 768, 1, 12, 1000), (IMAGE,)),
    "bert": (lambda: torch_models.bert(1000, 512, 768, 1, 12), (TOKENS, torch.ones_like(TOKENS))),
    "gpt2": (lambda: torch_models.gpt2(5025, 1024, 768, 1, 12), (TOKENS,)),
}
needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="needs nvcc")


MODELS |= {f"published {name}": model for name, model in torch_models.published_models().items()}
FAST = ("bert", "mobilenet")
"""Models that together have all kinds of kernels of the others."""


def marks_of(name):
    return pytest.mark.long if name.startswith("published") else () if name in FAST else pytest.mark.slow


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks_of(name)) for name in sorted(MODELS)])
def model(request):
    build, inputs = MODELS[request.param]
    return tvm_split.load_model(build(), inputs, name=request.param)


@pytest.fixture(scope="module", params=[pytest.param("sm_80", marks=pytest.mark.long), "sm_90"])
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def scheduled(model, arch, tmp_path_factory):
    """The whole network's kernels, from the steps of `tvm_split.compile`."""
    folder = tmp_path_factory.mktemp("stage")
    plan = plan_for_a_gpu(model, arch, folder)
    (stage,) = partition(model, plan).computations
    return StageCompiler(plan.machine("gpu").target).lower(stage.function)["name"]


@pytest.fixture(scope="module")
def source(scheduled, arch):
    return source_of(scheduled, arch)


def source_of(lowered, arch="sm_90"):
    with cuda(arch):
        return cuda_source(tvm.compile(module_of_kernels(lowered), target=cuda(arch)))


def test_every_kernel_of_a_network_is_bound_and_fits(scheduled, source):
    functions = [function for _, function in scheduled.functions_items() if isinstance(function, tirx.PrimFunc)]
    chosen = schedules.chosen_rules(scheduled)
    assert len(chosen) == len(functions)
    assert set(chosen.values()).isdisjoint({"none", "fallback"})
    kernels = kernels_of(source)
    assert len(kernels) >= len(functions)
    assert source.count("__global__") == 2 * len(kernels)
    for kernel in kernels:
        assert 32 <= kernel.threads <= MOST_THREADS, kernel
        assert kernel.shared_bytes <= MOST_STATIC_SHARED_BYTES, kernel


@needs_nvcc
@pytest.mark.parametrize("model", [pytest.param(name, marks=marks_of(name)) for name in sorted(MODELS)], indirect=True)
def test_nvcc_compiles_every_kernel_of_a_network(source, arch, tmp_path):
    assembled = compile_with_nvcc(source, arch, tmp_path)
    assert {kernel.name for kernel in assembled} == {kernel.name for kernel in kernels_of(source)}
    for kernel in assembled:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes <= MOST_STATIC_SHARED_BYTES, kernel


def half_graph(kind, dtype):
    """A product or a convolution in half precision, and its inputs."""
    if kind == "product":
        return product(dtype), [np.zeros((1, 197, 768), "float32"), np.zeros((768, 768), "float32")]
    weight, bias = normal(0, 128, 96, 3, 3).astype(dtype), normal(1, 128).astype(dtype)
    return convolution(weight, bias, padding=(1, 1)), [np.zeros((1, 96, 28, 28), dtype)]


SINCE = (("float16", "sm_75"), ("float16", "sm_90"), ("bfloat16", "sm_80"), ("bfloat16", "sm_90"))


@needs_nvcc
@pytest.mark.parametrize(
    ("kind", "dtype", "arch", "chosen"),
    [
        ("product", "bfloat16", "sm_90", "tensor_core"),
        ("product", "bfloat16", "sm_75", "matmul"),
        *slow(
            *(("product", *since, "tensor_core") for since in SINCE[:-1]),
            *(("convolution", *since, "tensor_core") for since in SINCE),
            ("convolution", "bfloat16", "sm_75", "conv2d"),
        ),
    ],
)
def test_half_precision_uses_tensor_cores_that_have_it(kind, dtype, arch, chosen, tmp_path):
    lowered = lower(graph_of(*half_graph(kind, dtype)), cuda(arch))
    assert chosen in schedules.chosen_rules(lowered).values()
    source = source_of(lowered, arch)
    assert ("nvcuda::wmma::mma_sync" in source) == (chosen == "tensor_core")
    counted = {kernel.name: kernel.shared_bytes for kernel in kernels_of(source)}
    for kernel in compile_with_nvcc(source, arch, tmp_path):
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes == counted[kernel.name], kernel
