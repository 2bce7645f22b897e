"""``tvm-split doctor``: check this installation or a cluster."""

import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

import typer
from packaging.requirements import Requirement

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.files import NO_HOME, SET_HOME
from rpc_runtime.hardware import available_memory_bytes, cpu_features, own_cores, total_memory_bytes
from rpc_runtime.option import option
from rpc_runtime.program.routes import CLIENT
from tvm_split.cli import options
from tvm_split.cli.source import MachineOptions, load_tvm
from tvm_split.cli.status import answering
from tvm_split.display.findings import Finding, Findings, Level
from tvm_split.display.view import write
from tvm_split.errors import ClusterError
from tvm_split.progress import step_progress
from tvm_split.units import bytes_text

DISTRIBUTION = "tvm-split"
NOT_FOR_USERS = ("development", "frameworks")
"""Extras for developers of this package, which are not checked."""


def doctor(
    machines: MachineOptions,
    timeout: float = option(15.0, "The longest wait for a worker.", metavar="SECONDS", minimum=0.1),
    json: bool = options.JSON,
) -> None:
    """Check this installation: packages, compiler, linker, processor, and a network of two stages on two workers.

    With a cluster, check its machines instead: workers, versions, clocks, certificates, processors, memory, links. That
    changes nothing there. Exit code 1 if there is a problem.

    Example: tvm-split doctor --cluster lab.yaml
    """
    findings = _here() if machines == MachineOptions() else _of_cluster(machines, timeout)
    write(findings, json=json)
    if not findings.ok:
        raise typer.Exit(1)


def _here() -> Findings:
    with step_progress("checking this installation") as report:
        findings: list[Finding] = []
        for finding in all_checks():
            findings.append(finding)
            report(finding.check, len(findings), len(findings) + 1)
    return Findings(tuple(findings))


def _of_cluster(machines: MachineOptions, timeout_seconds: float) -> Findings:
    with step_progress("asking the machines"), answering(machines, timeout_seconds) as (answers, cluster):
        if not answers:
            raise ClusterError(f"{machines.location} lists no worker")
        load_tvm()
        from tvm_split.cli.cluster_checks import link_findings, machine_findings  # loads TVM

        findings = machine_findings(answers, cluster) + link_findings(answers, cluster, timeout_seconds)
    order = {name: place for place, name in enumerate([CLIENT, *(answer.name for answer in answers)])}
    return Findings(tuple(sorted(findings, key=lambda finding: order[finding.machine])))


def all_checks() -> Iterator[Finding]:
    """Yield the results of all checks, in an order in which a failure explains later failures."""
    yield _finding("Python", Level.OK, platform.python_version())
    yield from _packages()
    for check in (_compiler, _linker, _processor, _cores, _memory, _deployment, _cuda):
        yield _guarded(check)


def _finding(check: str, level: Level, found: str, remedy: str = "") -> Finding:
    return Finding(CLIENT, check, level, found, remedy=remedy)


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_")
        if isinstance(error, TvmSplitError):
            return _finding(name, Level.PROBLEM, str(error))
        advice = SET_HOME if str(error) == NO_HOME else "in a checkout of tvm-split: pip install --force-reinstall ."
        return _finding(name, Level.PROBLEM, f"{type(error).__name__}: {error}", advice)


def _packages() -> Iterator[Finding]:
    """Check the required packages and the installed extras' versions; list the missing extras in one line."""
    try:
        required = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield _finding(
            "installation", Level.WARNING, f"{DISTRIBUTION} is not installed as a package", "pip install -e ."
        )
        return
    yield _versions("packages", [requirement for requirement in required if not requirement.marker], Level.PROBLEM)
    missing = []
    for extra in metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        needed = [part for part in required if part.marker and part.marker.evaluate({"extra": extra})]
        check = _versions(f"extra {extra}", needed, Level.WARNING)
        if extra in NOT_FOR_USERS or check.level is Level.OK:
            continue
        if any(_version(requirement.name) is None for requirement in needed):
            missing.append(extra)
        else:
            yield check
    if missing:
        advice = f"where one is needed: pip install 'tvm-split[{missing[0]}]'"
        yield _finding("extras", Level.OK, f"not installed: {', '.join(missing)}", advice)


def _versions(name: str, required: Sequence[Requirement], level: Level) -> Finding:
    versions = {requirement.name: _version(requirement.name) for requirement in required}
    wrong = [
        requirement
        for requirement in required
        if (version := versions[requirement.name]) is None
        or not requirement.specifier.contains(version, prereleases=True)
    ]
    names = [requirement.name for requirement in wrong or required]
    shown = [f"{name} {versions[name] or 'is not installed'}" for name in names]
    if not wrong:
        return _finding(name, Level.OK, ", ".join(shown))
    install = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement in wrong)
    return _finding(name, level, ", ".join(shown), f"pip install {install}")


def _compiler() -> Finding:
    import tvm

    if not tvm.runtime.enabled("llvm"):
        return _finding(
            "compiler", Level.PROBLEM, "TVM without LLVM", "unset TVM_USE_RUNTIME_LIB, or reinstall apache-tvm"
        )
    major = tvm.target.codegen.llvm_version_major()
    return _finding("compiler", Level.OK, f"TVM {tvm.__version__} with LLVM {major}")


def _linker() -> Finding:
    from tvm.support import cc

    linker = cc.get_cc()
    if linker is None:
        return _finding("linker", Level.PROBLEM, "no C compiler to link with", "install gcc or clang, or set CXX")
    if shutil.which(linker) is None:
        return _finding("linker", Level.PROBLEM, f"{linker} does not exist", "set CXX to a compiler, or unset it")
    return _finding("linker", Level.OK, str(linker))


def _processor() -> Finding:
    """Report the target for which deployments on this host are compiled."""
    from tvm_split.compiler.targets import host_target, target_text

    target, features = target_text(host_target(1)), cpu_features()
    if not features:
        return _finding(
            "processor",
            Level.WARNING,
            target,
            "/proc/cpuinfo lists no instruction sets of this architecture: mount /proc, or kernels use the basic ones",
        )
    if platform.machine() == "x86_64" and "avx2" not in features:
        advice = "nothing to do; kernels are several times slower than on processors with AVX2"
        return _finding("processor", Level.WARNING, target, advice)
    return _finding("processor", Level.OK, target)


def _cores() -> Finding:
    cores = own_cores()
    if cores.count == 1:
        advice = "use one worker on this host: several would share this core and gain nothing"
        return _finding("cores", Level.WARNING, cores.text, advice)
    return _finding("cores", Level.OK, f"this process may use {cores.text}")


def _memory() -> Finding:
    free, total = available_memory_bytes(), total_memory_bytes()
    return _finding("memory", Level.OK, f"{bytes_text(free)} free of the {bytes_text(total)} that this process may use")


def _deployment() -> Finding:
    """Compile a network of two stages for this host's target, run it on two workers, and compare."""
    import numpy as np
    from tvm import relax

    import tvm_split
    from rpc_runtime.program.specs import TensorSpec
    from tvm_split.frontends.building import ModelBuilder
    from tvm_split.frontends.operators import Operators

    weights = {
        name: np.random.default_rng(len(name)).standard_normal((16, 16), "float32") for name in ("first", "second")
    }
    builder = ModelBuilder()
    with builder.main([TensorSpec("x", (4, 16), "float32")]) as (value,):
        for builder.layer, weight in weights.items():
            value = Operators(builder).matmul(value, relax.const(weight))
        builder.outputs = [value]
    model = builder.built({}).model("doctor", "Relax")
    array = np.random.default_rng(2).standard_normal((4, 16), dtype="float32")
    with tvm_split.Cluster.local(workers=2) as cluster:
        plan = tvm_split.plan(model, cluster, split={"machine-a": ["first"], "machine-b": ["second"]})
        with tvm_split.deploy(tvm_split.compile(model, plan, verify=False), cluster) as deployment:
            (result,) = deployment.run(array)
    difference = float(np.abs(result - array @ weights["first"] @ weights["second"]).max())
    if not difference < 1e-3:
        problem = f"two stages on two workers differ from numpy by {difference:g}"
        return _finding("deployment", Level.PROBLEM, problem, "install apache-tvm again")
    return _finding("deployment", Level.OK, "two stages on two workers give the right answer")


def _cuda() -> Finding:
    import tvm

    device = tvm.cuda(0)
    if device.exist:
        return _finding("CUDA", Level.OK, f"{device.device_name}, compute capability {device.compute_version}")
    return _finding("CUDA", Level.OK, "no GPU here; CPUs only")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
