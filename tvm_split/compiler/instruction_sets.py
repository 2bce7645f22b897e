"""The instruction sets that a target lets LLVM use, and those that a processor lacks of them."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from typing import Any

import tvm

from tvm_split.errors import ClusterError
from tvm_split.rpc_runtime.hardware import cpu_features

_NAMES = {
    "x86_64": "cmov mmx sse sse2 sse3=pni ssse3 sse4.1=sse4_1 sse4.2=sse4_2 sse4a popcnt avx avx2 f16c fma fma4 xop "
    "tbm bmi=bmi1 bmi2 movbe adx cx16 gfni vaes vpclmulqdq lzcnt=abm sahf=lahf_lm pclmul=pclmulqdq avx512f avx512cd "
    "avx512dq avx512bw avx512vl avx512er avx512pf avx512ifma avx512vbmi avx512vnni=avx512_vnni avx512bf16=avx512_bf16 "
    "avx512fp16=avx512_fp16 avx512vbmi2=avx512_vbmi2 avx512bitalg=avx512_bitalg avx512vpopcntdq=avx512_vpopcntdq "
    "avx512vp2intersect=avx512_vp2intersect avxvnni=avx_vnni avxvnniint8=avx_vnni_int8 avxvnniint16=avx_vnni_int16 "
    "avxifma=avx_ifma avxneconvert=avx_ne_convert amx-tile=amx_tile amx-int8=amx_int8 amx-bf16=amx_bf16 "
    "amx-fp16=amx_fp16",
    "aarch64": "fp-armv8=fp neon=asimd fullfp16=asimdhp fp16fml=asimdfhm dotprod=asimddp rdm=asimdrdm complxnum=fcma "
    "jsconv=jscvt lse=atomics crc=crc32 bf16 i8mm sve sve2 sme sme2",
    "arm": "neon vfp3=vfpv3 vfp4=vfpv4 hwdiv-arm=idiva hwdiv=idivt",
}
"""By architecture, LLVM's names of what compilers emit for arithmetic; after a =, what /proc/cpuinfo says."""
_LINUX_NAMES = {
    family: {llvm: linux or llvm for llvm, _, linux in (name.partition("=") for name in names.split())}
    for family, names in _NAMES.items()
}


def cpu_part(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a target says of the CPU: of a GPU's target its host, which may say nothing."""
    part = target if target["kind"] == "llvm" else target.get("host")
    return part if isinstance(part, Mapping) else {"kind": "llvm"}


def cannot_execute(target: Mapping[str, Any], architecture: str, features: Collection[str]) -> str:
    """Why a processor cannot execute a target's code for CPUs, in words that follow its name; empty if it can.

    Args:
        architecture: the processor's, as ``platform.machine()`` says it.
        features: what Linux calls its instruction sets; without any, or for an architecture whose names are not known
            here, only the architecture is compared.
    """
    cpu = cpu_part(target)
    wanted = _architecture_of(cpu)
    if _family(wanted) != _family(architecture):
        return f"is {architecture}, not {wanted}"
    if not features:
        return ""
    lacking = sorted(_instruction_sets(cpu) - set(features))
    return f"has no {', '.join(lacking)}" if lacking else ""


def require_executable(
    what: str, machine: str, target: Mapping[str, Any], architecture: str, features: Collection[str]
) -> None:
    """A `ClusterError` if a machine cannot execute ``what`` is compiled for its target; see `cannot_execute`."""
    problem = cannot_execute(target, architecture, features)
    if problem:
        raise ClusterError(
            f"{what} on {machine!r} is compiled for {dict(target)}, and the machine's processor {problem}: the code "
            "would crash there. Give the machine its right target, or leave its target out, and compile again"
        )


def own_features() -> frozenset[str]:
    """What Linux calls this host's instruction sets; where it is not Linux, those that LLVM knows of its CPU."""
    return cpu_features() or _instruction_sets({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})


def _instruction_sets(cpu: Mapping[str, Any]) -> frozenset[str]:
    """Linux's names of the instruction sets that a target lets LLVM use, as far as they have one."""
    names = _LINUX_NAMES.get(_family(_architecture_of(cpu)), {})
    relevant = {name: value for name, value in cpu.items() if name in ("kind", "mcpu", "mattr", "mtriple")}
    features = map(str, tvm.target.codegen.llvm_get_cpu_features(tvm.target.Target(relevant)))
    return frozenset(names[feature] for feature in features if feature in names)


def _architecture_of(cpu: Mapping[str, Any]) -> str:
    return str(cpu.get("mtriple") or platform.machine()).partition("-")[0]


def _family(architecture: str) -> str:
    """One name for an architecture: triples and systems have several."""
    if architecture.startswith(("armv", "thumb")) or architecture == "arm":
        return "arm"
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(architecture, architecture)
