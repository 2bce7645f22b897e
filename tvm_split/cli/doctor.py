"""``tvm-split doctor``: is this installation fit for work? Each check looks at one thing, and says what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from typing import Any

import typer
from packaging.requirements import Requirement
from rich.text import Text

from tvm_split.cli import options
from tvm_split.cli.console import STDOUT, print_json

DISTRIBUTION = "tvm-split"
EXTRAS = {
    "torch": "models of PyTorch",
    "onnx": "models in ONNX files",
    "jax": "models of JAX and Flax, and StableHLO files",
    "keras": "models of Keras",
    "tensorflow": "TensorFlow's SavedModels",
    "tflite": "TFLite files",
    "demo": "`tvm-split demo`, and timelines as pictures",
    "images": "images as inputs of `tvm-split run`",
    "tracker": "starting TVM's RPC tracker, for tuning on several machines",
    "mpi": "links of the transport mpi between workers that one mpiexec starts",
    "codecs": "links with the codecs lz4 and zstd",
    "ray": "workers that Ray places on its nodes",
    "cross": "compiling for machines of another architecture",
    "cuda": "compiling for GPUs without CUDA's toolkit, and running on them",
}
PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 14)
VECTOR_LEVELS = ("x86-64-v3", "x86-64-v4")
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(json: options.JsonOption = False) -> None:
    """Check this installation: packages, compiler, linker, processor, and a tiny program compiled and run."""
    found: list[Check] = []
    for check in all_checks():
        found.append(check)
        if not json:
            line = Text.assemble((f"{check.verdict:<5}", COLOURS[check.verdict]), f"{check.name}: {check.found}")
            if check.advice:
                line.append(f"\n     → {check.advice}")
            STDOUT.print(line, soft_wrap=True)
    failed = [check.name for check in found if check.verdict is Verdict.FAIL]
    if json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in found]})
    if failed:
        raise typer.Exit(1)


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and what to do about it (empty if nothing)."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def all_checks() -> Iterator[Check]:
    """Every check, in an order in which a failure explains those after it."""
    yield _python()
    yield from _packages()
    for check in (_compiler, _linker, _processor, _cores, _tiny_program, _worker, _cuda):
        yield _guarded(check)


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        advice = "install again: pip install --force-reinstall tvm-split"
        return Check(name, Verdict.FAIL, f"{type(error).__name__}: {error}", advice)


def _python() -> Check:
    version = sys.version.split()[0]
    if PYTHON_FROM <= sys.version_info[:2] < PYTHON_BELOW:
        return Check("Python", Verdict.OK, version)
    wanted = f"{'.'.join(map(str, PYTHON_FROM))} or newer, below {'.'.join(map(str, PYTHON_BELOW))}"
    return Check("Python", Verdict.FAIL, version, f"use Python {wanted}")


def _packages() -> Iterator[Check]:
    """What this one requires, and each extra; other versions than required are known to break, or untried."""
    try:
        required = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield Check("installation", Verdict.WARN, f"{DISTRIBUTION} is not installed as a package", "pip install -e .")
        return
    own = [each for each in required if each.marker is None]
    yield _versions("packages", own, Verdict.FAIL, "")
    for extra, purpose in EXTRAS.items():
        its = [each for each in required if each.marker is not None and each.marker.evaluate({"extra": extra})]
        yield _versions(f"extra {extra}", its, Verdict.WARN, f"for {purpose}: ")


def _versions(name: str, required: Sequence[Requirement], verdict: Verdict, purpose: str) -> Check:
    found = {each.name: _version(each.name) for each in required}
    wrong = [
        each
        for each in required
        if (version := found[each.name]) is None or not each.specifier.contains(version, prereleases=True)
    ]
    text = ", ".join(f"{each.name} {found[each.name] or 'is not installed'}" for each in wrong or required)
    if not wrong:
        return Check(name, Verdict.OK, text)
    install = " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
    return Check(name, verdict, text, f"{purpose}pip install {install}")


def _compiler() -> Check:
    import tvm

    if not tvm.runtime.enabled("llvm"):
        return Check("compiler", Verdict.FAIL, "TVM without LLVM", "unset TVM_USE_RUNTIME_LIB, or reinstall apache-tvm")
    major = tvm.target.codegen.llvm_version_major()
    return Check("compiler", Verdict.OK, f"TVM {tvm.__version__} with LLVM {major}")


def _linker() -> Check:
    from tvm.support import cc

    found = cc.get_cc()
    if found is None:
        return Check("linker", Verdict.FAIL, "no C compiler to link with", "install gcc or clang, or set CXX")
    return Check("linker", Verdict.OK, str(found))


def _processor() -> Check:
    import platform

    import tvm

    from tvm_split.rpc_runtime.hardware import cpu_features, mcpu

    level = mcpu(platform.machine(), cpu_features())
    found = f"{tvm.target.codegen.llvm_get_system_cpu()} ({level})"
    if platform.machine() == "x86_64" and level not in VECTOR_LEVELS:
        advice = "nothing to do, but kernels run at a fraction of the speed of processors with AVX2"
        return Check("processor", Verdict.WARN, found, advice)
    return Check("processor", Verdict.OK, found)


def _cores() -> Check:
    from tvm_split.cluster.cluster import usable_cores

    count = usable_cores()
    if count == 1:
        advice = "several workers on this host would share it, and gain nothing"
        return Check("cores", Verdict.WARN, "1 core", advice)
    return Check("cores", Verdict.OK, f"{count} cores that this process may use")


def _tiny_program() -> Check:
    """Compile y = x + x, link it, load it, run it."""

    import numpy as np
    import tvm
    from tvm import relax

    from tvm_split.rpc_runtime.scratch import ScratchFolder

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.add(x, x)))
    executable = relax.build(builder.get(), tvm.target.Target({"kind": "llvm"}))
    with ScratchFolder("doctor") as folder:
        library = str(folder.path / "tiny.so")
        executable.export_library(library)
        machine = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
        result: Any = machine["main"](tvm.runtime.tensor(np.arange(4, dtype="float32"))).numpy()
    if result.tolist() != [0.0, 2.0, 4.0, 6.0]:
        found = f"0, 1, 2, 3 doubled gave {result.tolist()}"
        return Check("compile and run", Verdict.FAIL, found, "install apache-tvm again")
    return Check("compile and run", Verdict.OK, "a tiny program gives the right answer")


def _worker() -> Check:
    """Start a worker process and ask it what it is."""
    from tvm_split.rpc_runtime.client.client import describe
    from tvm_split.rpc_runtime.client.local_workers import LocalWorkers

    with LocalWorkers(("probe",)) as workers:
        description = describe(workers.endpoints["probe"], timeout_seconds=20.0)
    return Check("worker", Verdict.OK, f"a worker process answers, with {description.threads} thread")


def _cuda() -> Check:
    import tvm

    device = tvm.cuda(0)
    if device.exist:
        return Check("CUDA", Verdict.OK, f"{device.device_name}, compute capability {device.compute_version}")
    return Check("CUDA", Verdict.OK, "no GPU here; CPUs only")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
