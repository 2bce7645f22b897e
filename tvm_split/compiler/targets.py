"""Derive compilation targets of CPUs from instruction sets, and check what LLVM knows and a processor can execute."""

import copy
import os
import platform
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import tvm

from rpc_runtime.hardware import LINUX_NAMES, cpu_features
from tvm_split.cluster.machine import MOST_CORES
from tvm_split.errors import ClusterError, PlanError

_LEVELS = {"x86_64": ("znver5", "x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64")}
"""By architecture, LLVM's names of processors that stand for sets of features, the largest set first.

The levels of x86-64 are in its psABI (https://gitlab.com/x86-psABIs/x86-64-ABI). Other architectures: ``generic``.
The name also selects the processor that LLVM orders instructions for, a Skylake for x86-64-v4. On a Zen 5, the same
kernels took 0.98 of the time with its own name (BERT and GPT-2), 0.99 (ViT, MobileNetV2) and 1.00 (ResNet-50).
"""
_ADDED = {
    "x86_64": "avx512fp16 avx512bf16 avx512vnni avx512vbmi avx512vl avx512dq avx512bw avx512cd avx512f avxvnniint8 "
    "avxvnni avx2 fma f16c avx sse4.2 sse4.1 ssse3 popcnt bmi2 bmi lzcnt movbe",
    "aarch64": "sve2 sve i8mm bf16 fp16fml fullfp16 dotprod neon",
    "arm": "neon vfp4",
}
"""Features that may be added to a level, by architecture, in LLVM's names; a feature precedes those it implies.

AMX is not included: a process must request it from the system (``arch_prctl``). Without the request, its instructions
are refused although the processor reports them. A user's own target may name it.
"""
_ARM = re.compile(r"(arm(eb)?(v\d\w*)?|arm64|aarch64(_be|_32)?)(-|$)")
"""Triples of ARM that LLVM can parse; for another triple with such a prefix, LLVM 22 ends the process."""
_ABI = {
    "x86_64": ({"64bit", "64bit-mode", "sse2"}, {"16bit-mode", "32bit-mode", "soft-float", "x32"}),
    "aarch64": ({"fp-armv8", "neon"}, set[str]()),
}
"""By architecture, features that code must have and must not have: calls need them, or LLVM ends the process."""
_SILENCING = threading.Lock()
"""Only one thread at a time may redirect standard error; otherwise the last one restores the wrong file."""


def host_target(threads: int) -> dict[str, Any]:
    """Return the target of this host's CPU; a worker on an identical host has the same."""
    return cpu_target(platform.machine(), cpu_features(), threads)


def cpu_target(architecture: str, features: Collection[str], threads: int) -> dict[str, Any]:
    """Return the LLVM target of a CPU: the largest set of features that it fully supports, plus further features.

    The model's name is not used: virtual machines and operating systems hide features of the model.

    Args:
        architecture: what ``platform.machine()`` returns there.
        features: Linux's names of the instruction sets that it can execute, see `rpc_runtime.hardware.cpu_features`.
        threads: how many threads a kernel uses.
    """
    return {**copy.deepcopy(_cpu_target(architecture, frozenset(features))), "num-cores": threads}


@cache
def _cpu_target(architecture: str, features: frozenset[str]) -> dict[str, Any]:
    family = _family(architecture)
    triple = {} if family == _family(platform.machine()) else {"mtriple": f"{architecture}-linux-gnu"}
    *levels, lowest = _LEVELS.get(family, ("generic",))
    if triple and not _knows_cpu(lowest, triple["mtriple"]):  # LLVM ends the process for an unknown architecture
        return {"kind": "llvm", "mcpu": lowest, **triple}
    names = (level for level in levels if _instruction_sets({"mcpu": level, **triple}) <= features)
    target: dict[str, Any] = {"kind": "llvm", "mcpu": next(names, lowest), **triple}
    enabled = _instruction_sets(target)
    mattr: list[str] = []
    for name in _ADDED.get(family, "").split() if features else ():
        # A feature is added only if the processor has everything that LLVM enables with it.
        implied = _instruction_sets({**target, "mattr": [*mattr, f"+{name}"]})
        if enabled < implied <= features | enabled:
            mattr, enabled = [*mattr, f"+{name}"], implied
    return {**target, "mattr": mattr} if mattr else target


def target_text(target: Mapping[str, Any]) -> str:
    """A short text of a target for messages: ``x86-64-v4+avx512vnni``, ``sm_90``."""
    if target["kind"] != "llvm":
        return str(target.get("arch", target["kind"]))
    return "".join(map(str, [target.get("mcpu", "generic"), *target.get("mattr", ())]))


def cpu_part(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the CPU's part of a target: for a GPU its host, or a plain LLVM target if that is missing."""
    part = target if target["kind"] == "llvm" else target.get("host")
    return part if isinstance(part, Mapping) else {"kind": "llvm"}


def cannot_execute(target: Mapping[str, Any], architecture: str, features: Collection[str]) -> str:
    """Return why a processor cannot execute a target's CPU code, as the end of "the processor …"; empty if it can.

    Args:
        architecture: what ``platform.machine()`` returns on the processor.
        features: Linux's names of its instruction sets. If there are none, or the architecture's names are not known
            here, only the architecture is compared.
    """
    cpu = cpu_part(target)
    target_architecture = _architecture_of(cpu)
    if _family(target_architecture) != _family(architecture):
        return f"is {architecture}, not {target_architecture}"
    if not features:
        return ""
    lacking = sorted(_instruction_sets(cpu) - set(features))
    return f"has no {', '.join(lacking)}" if lacking else ""


def unused_by(target: Mapping[str, Any], architecture: str, features: Collection[str]) -> list[str]:
    """Return the instruction sets of a processor's own target that ``target`` leaves unused."""
    return sorted(_instruction_sets(cpu_target(architecture, features, 1)) - _instruction_sets(cpu_part(target)))


def require_executable(
    what: str, machine: str, target: Mapping[str, Any], architecture: str, features: Collection[str]
) -> None:
    """Raise a `ClusterError` if a machine's processor cannot execute ``what``, which is compiled for ``target``."""
    problem = cannot_execute(target, architecture, features)
    if problem:
        raise ClusterError(
            f"{what} on {machine!r} is compiled for {dict(target)}, and the machine's processor {problem}: the code "
            "would crash there. Give the machine its right target, or leave its target out, and compile again"
        )


def _instruction_sets(cpu: Mapping[str, Any]) -> frozenset[str]:
    """Linux's names of the instruction sets that a target lets LLVM use; sets without a Linux name are left out."""
    names = LINUX_NAMES.get(_family(_architecture_of(cpu)), {})
    return frozenset(names[feature] for feature in _enabled(cpu) if feature in names)


def _enabled(cpu: Mapping[str, Any]) -> set[str]:
    relevant = {"kind": "llvm"} | {name: cpu[name] for name in ("mcpu", "mattr", "mtriple") if name in cpu}
    return set(map(str, tvm.target.codegen.llvm_get_cpu_features(tvm.target.Target(relevant))))


def _architecture_of(cpu: Mapping[str, Any]) -> str:
    return str(cpu.get("mtriple") or platform.machine()).partition("-")[0]


def _family(architecture: str) -> str:
    """Return one name for an architecture, since triples and systems use several."""
    if architecture.startswith(("armv", "thumb")) or architecture == "arm":
        return "arm"
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(architecture, architecture)


def runs_here(target: Mapping[str, Any]) -> bool:
    """Whether this host can run a target's code: for a CPU of its architecture, with instructions that it has."""
    return target["kind"] == "llvm" and not cannot_execute(target, platform.machine(), cpu_features())


def tvm_target(target: Mapping[str, Any]) -> tvm.target.Target:
    """Return TVM's target.

    Raises:
        PlanError: TVM does not accept it, it is not for Linux, LLVM does not know its CPU or features or cannot compile
            for them, its number of cores is impossible, or a GPU has no architecture.
    """
    if target.get("kind") == "cuda" and "arch" not in target:
        raise PlanError(f"the target {dict(target)} names no architecture; add one, such as 'arch': 'sm_90'")
    cpu = cpu_part(target)
    _require_linux(cpu)
    _require_known_cpu(cpu)
    _require_known_features(cpu)  # checked first: TVM would let LLVM print warnings about them
    try:
        created = tvm.target.Target(dict(target))
    except Exception as error:
        raise PlanError(f"TVM does not accept the target {dict(target)}: {error}") from error
    if not 1 <= (cores := cpu.get("num-cores", 1)) <= MOST_CORES:
        raise PlanError(f"the target {dict(target)} has {cores} num-cores; give a number from 1 to {MOST_CORES}")
    needed, excluded = _ABI.get(_family(_architecture_of(cpu)), (set(), set()))
    enabled = _enabled(cpu)
    if wrong := [f"no {name}" for name in sorted(needed - enabled)] + sorted(excluded & enabled):
        raise PlanError(
            f"the target {dict(target)} has {', '.join(wrong)}, so its code could not call other code; leave that out "
            "of its mattr, or give another mcpu"
        )
    return created


def _require_linux(cpu: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for a triple of another system, for which LLVM compiles and nothing here links."""
    _, *system = _triple(cpu).split("-")
    if system and not any(part.startswith("linux") for part in system):
        raise PlanError(f"the target {dict(cpu)} is of another system; workers run on Linux alone")


def _require_known_cpu(cpu: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for a CPU that LLVM does not know.

    LLVM would print a list and compile for a generic CPU. For an unknown architecture it would end the process.
    """
    name, triple = str(cpu.get("mcpu", "generic")), _triple(cpu)
    if not _knows_cpu(name, triple):
        raise PlanError(
            f"LLVM knows no CPU {name!r} for {triple}; give the target an mcpu and mtriple that it knows, or "
            "leave out the machine's target to use the one that its worker reports"
        )


def _require_known_features(cpu: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for unknown features in ``mattr`` and for names without a sign, which LLVM reads as "-".

    TVM itself refuses a ``mattr`` that is not a list of strings.
    """
    triple, mattr = _triple(cpu), cpu.get("mattr", ())
    texts = mattr if isinstance(mattr, Sequence) and all(isinstance(text, str) for text in mattr) else ()
    for feature in (feature for text in texts for feature in text.split(",")):
        if feature[:1] not in ("+", "-") or not _knows_feature(feature[1:], triple):
            raise PlanError(
                f"LLVM knows no feature {feature!r} of {triple}; the mattr of a target is a list of features by "
                "LLVM's names, each with a + or a -, such as '+avx2' or '+dotprod'"
            )


@cache
def _knows_cpu(name: str, triple: str) -> bool:
    """Whether LLVM has a CPU of this name for a triple of any architecture."""
    if triple.startswith(("arm", "aarch64")) and not _ARM.match(triple):
        return False
    with _silenced():
        return bool(tvm.target.codegen.llvm_is_valid_cpu(name, triple))


@cache
def _knows_feature(name: str, triple: str) -> bool:
    """Whether enabling a feature adds it to LLVM's set; LLVM has no list of feature names."""
    with _silenced():
        target = tvm.target.Target({"kind": "llvm", "mtriple": triple, "mattr": [f"+{name}"]})
        return name in tvm.target.codegen.llvm_get_cpu_features(target)


@contextmanager
def _silenced() -> Iterator[None]:
    """Redirect standard error to /dev/null: LLVM reports unknown names there."""
    with _SILENCING, Path(os.devnull).open("w") as nothing:
        saved = os.dup(2)
        try:
            os.dup2(nothing.fileno(), 2)
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _triple(cpu: Mapping[str, Any]) -> str:
    return str(cpu.get("mtriple") or tvm.target.codegen.llvm_get_system_triple())
