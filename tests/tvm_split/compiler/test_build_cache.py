"""An unchanged network is compiled once; whatever changes its code, or the kept files, makes it compile again."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tvm_split
from rpc_runtime.program.specs import TensorSpec
from schedules import machine_of
from schedules.template import text_of
from schedules.tuning.database import DatabaseWriter
from tests.helpers.full_disk import full_disk
from tests.helpers.mutations import mutated
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.build_cache import content_in, keep_contents
from tvm_split.compiler.targets import host_target, tvm_target
from tvm_split.errors import CacheWarning, OutputError
from tvm_split.placement.plan import PlannedCodec
from tvm_split.profiling.kernels import target_code
from tvm_split.tuning import kernels_to_tune

pytestmark = pytest.mark.usefixtures("cache")

MACHINES = ("machine-a", "machine-b")
SPLIT = {"machine-a": ["0"], "machine-b": ["2"]}


def model_of(scale: float = 1.0) -> tvm_split.Model:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        network[2].weight.mul_(scale)
    return tvm_split.load_model(network, (torch.ones(1, 8),))


def plan_of(model: tvm_split.Model, split: dict[str, list[str]] = SPLIT) -> tvm_split.Plan:
    return tvm_split.plan(model, tvm_split.Cluster.in_process(machines=2, threads=1), split=split)


def compiled(model: tvm_split.Model, plan: tvm_split.Plan, **options: Any) -> tuple[tvm_split.Bundle, bool]:
    """Compile; return the bundle, and whether any stage was really compiled."""
    steps: list[str] = []
    bundle = tvm_split.compile(model, plan, on_progress=lambda what, done, total: steps.append(what), **options)
    return bundle, any(step.startswith("compiling") for step in steps)


def result_of(model: tvm_split.Model, bundle: tvm_split.Bundle) -> np.ndarray:
    with tvm_split.deploy(bundle, tvm_split.Cluster.in_process(machines=2, threads=1)) as deployment:
        (output,) = deployment.run(*model.example_inputs)
    return output


def test_an_unchanged_network_is_compiled_once(cache: Path, tmp_path: Path) -> None:
    first, is_compiled = compiled(model_of(), plan_of(model_of()))
    assert is_compiled
    model = model_of()
    plan = replace(plan_of(model), origin="another search")
    second, is_compiled = compiled(model, plan)
    assert not is_compiled
    assert second == replace(first, plan=plan)
    assert second.verified == "yes"
    damage(cache, "blobs/blobs/*/*", None)  # a bundle does not need the cache
    second.save(tmp_path / "bundle")
    assert tvm_split.Bundle.load(tmp_path / "bundle") == second
    np.testing.assert_array_equal(result_of(model, first), result_of(model, second))


def other_target(plan: tvm_split.Plan) -> tvm_split.Plan:
    first, *machines = plan.machines
    return replace(plan, machines=(replace(first, target={**first.target, "opt-level": 0}), *machines))


def other_codec(model: tvm_split.Model, plan: tvm_split.Plan) -> tvm_split.Plan:
    (tensor,) = tvm_split.compile(model, plan, verify=False).program.stages[0].outputs
    return replace(plan, codecs=(PlannedCodec(tensor.name, *MACHINES, "lz4"),))


CHANGES: dict[str, Callable[[tvm_split.Model, tvm_split.Plan], tuple[tvm_split.Model, tvm_split.Plan]]] = {
    "weights": lambda model, plan: (model_of(scale=2.0), plan),
    "split": lambda model, plan: (model, plan_of(model, {"machine-a": ["0"], "machine-b": ["1", "2"]})),
    "target": lambda model, plan: (model, other_target(plan)),
    "codec": lambda model, plan: (model, other_codec(model, plan)),
    "precision": lambda model, plan: (model, replace(plan, precision="float16")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_compiled(change: Callable[..., tuple[tvm_split.Model, tvm_split.Plan]]) -> None:
    model = model_of()
    plan = plan_of(model)
    compiled(model, plan, verify=False)
    assert not compiled(model, plan, verify=False)[1]
    assert compiled(*change(model, plan), verify=False)[1]


def test_tuned_kernels_are_used_at_once(tmp_path: Path) -> None:
    model = model_of()
    plan = plan_of(model)
    target = plan.machines[0].target
    (kernel, *_), _ = kernels_to_tune(model, plan, MACHINES, target)
    DatabaseWriter(tmp_path).close()
    assert compiled(model, plan, verify=False, database=tmp_path)[1]
    assert not compiled(model, plan, verify=False, database=tmp_path)[1]
    choices = kernel.template.space(kernel.function, machine_of(tvm_target(target))).default
    with DatabaseWriter(tmp_path) as writer:
        writer.add_decision(kernel.function, tvm_target(target), text_of(choices), 1e-9)
    assert compiled(model, plan, verify=False, database=tmp_path)[1]
    assert not compiled(model, plan, verify=False, database=tmp_path)[1]


def damage(cache: Path, files: str, content: bytes | None) -> None:
    for path in cache.glob(files):
        path.unlink() if content is None else path.write_bytes(content)


HARMS: dict[str, Callable[[Path], None]] = {
    "changed blobs": lambda cache: damage(cache, "blobs/blobs/*/*", b"x"),
    "removed blobs": lambda cache: damage(cache, "blobs/blobs/*/*", None),
    "wrong results": lambda cache: damage(cache, "compiled/*", b'0\n{"content": {}, "blobs": []}'),
    "no results": lambda cache: damage(cache, "compiled/*", b""),
    "results that others may write": lambda cache: (cache / "compiled").chmod(0o777),
    "blobs that others may write": lambda cache: (cache / "blobs").chmod(0o777),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_damaged_or_foreign_files_are_not_used(cache: Path, harm: Callable[[Path], None]) -> None:
    model = model_of()
    plan = plan_of(model)
    first, _ = compiled(model, plan)
    harm(cache)
    second, is_compiled = compiled(model, plan)
    assert is_compiled
    assert second == first


def test_the_results_of_another_network_are_not_used(cache: Path) -> None:
    """Files that were copied or renamed by hand, or by a broken disk, are whole but wrong."""
    one, other = model_of(), model_of(scale=2.0)
    plan = plan_of(one)
    compiled(one, plan, verify=False)
    before = set((cache / "compiled").iterdir())
    compiled(other, plan, verify=False)
    for path in set((cache / "compiled").iterdir()) - before:
        shutil.copy(next(iter(before)), path)
    bundle, is_compiled = compiled(other, plan, verify=False)
    assert is_compiled
    np.testing.assert_allclose(result_of(other, bundle), other.reference.outputs(other.example_inputs)[0], rtol=1e-5)


def test_a_blob_that_a_full_disk_has_cut_is_written_again(tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    with full_disk(), pytest.raises(OutputError, match="make room"):
        blobs.add(bytes(1000))
    assert blobs.path(blobs.add(bytes(1000)).sha256).read_bytes() == bytes(1000)


def test_changed_bytes_are_found_anywhere(tmp_path: Path) -> None:
    contents = {"first": b"content", "second": b"\n" * 9}
    keep_contents(tmp_path, contents, 9)
    assert {name: content_in(tmp_path / name) for name in contents} == contents
    source = random.Random(0)
    for name in contents:
        path = tmp_path / name
        whole = path.read_bytes()
        for damaged in {*(mutated(whole, source) for _ in range(50)), b"", whole[:1], whole[:-1]} - {whole}:
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="changed"):
                content_in(path)


@pytest.mark.parametrize("folder", ["compiled", "blobs"])
def test_what_is_not_kept_is_told_once(cache: Path, folder: str) -> None:
    (cache / folder).touch()
    with pytest.warns(CacheWarning) as caught:
        assert [compiled(model_of(), plan_of(model_of()), verify=False)[1] for _ in range(2)] == [True, True]
    (text,) = [str(warning.message) for warning in caught]
    assert str(cache / folder) in text
    assert text.count("): ") == 1
    assert text.endswith("): name another folder with $TVM_SPLIT_CACHE")  # and no option of a worker


@pytest.mark.parametrize("name", [".writing-1", "0" * 64])
def test_an_empty_file_does_not_end_the_keeping(cache: Path, name: str) -> None:
    """A process that is killed, or a crash of the system, leaves one."""
    (cache / "compiled").mkdir(mode=0o700)
    (cache / "compiled" / name).touch()
    model = model_of()
    plan = plan_of(model)
    compiled(model, plan, verify=False)
    assert not compiled(model, plan, verify=False)[1]


def test_every_bundle_is_compared_with_its_source() -> None:
    """Another source may have the same graph, if an importer overlooks the difference."""
    model = model_of()
    compiled(model, plan_of(model))
    other = replace(model, reference=model_of(scale=2.0).reference)
    with pytest.raises(tvm_split.VerificationError, match="disagree on output"):
        compiled(other, plan_of(other))


def test_kernels_to_time_are_kept_too() -> None:
    model, target = model_of(), host_target(1)
    blobs = [BlobFolder.temporary() for _ in range(2)]
    codes = [target_code(model, target, None) for _ in range(2)]
    assert [call.kernel for call in codes[0].calls] == [call.kernel for call in codes[1].calls]
    assert codes[0].untimeable == codes[1].untimeable
    assert codes[0].weight_bytes == codes[1].weight_bytes
    libraries = [code.build(code.distinct, folder) for code, folder in zip(codes, blobs, strict=True)]
    assert libraries[0] == libraries[1]
    assert all(folder.path(library.sha256).exists() for folder, library in zip(blobs, libraries, strict=True))
    assert codes[1].functions().keys() == codes[1].distinct.keys()
    assert isinstance(codes[1].calls[0].timed.arguments[0], TensorSpec)
