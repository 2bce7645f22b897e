"""Check names of CPUs and features: LLVM ignores unknown features and compiles unknown CPUs as generic."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import tvm

from tvm_split.errors import PlanError

_ARM = re.compile(r"(arm(eb)?(v\d\w*)?|arm64|aarch64(_be|_32)?)(-|$)")
"""Triples of ARM that LLVM can parse; for another triple with such a prefix, LLVM 22 ends the process."""
_SILENCING = threading.Lock()
"""Only one thread at a time may redirect standard error; otherwise the last one restores the wrong file."""


def require_known_cpu(cpu: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for a CPU that LLVM does not know.

    LLVM would print a list and compile for a generic CPU. For an unknown architecture it would end the process.
    """
    name, triple = str(cpu.get("mcpu", "generic")), _triple(cpu)
    if not knows_cpu(name, triple):
        raise PlanError(
            f"LLVM knows no CPU {name!r} for {triple}; give the target an mcpu and mtriple that it knows, or "
            "leave out the machine's target to use the one that its worker reports"
        )


def require_known_features(cpu: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for unknown features in ``mattr`` and for names without a sign, which LLVM reads as "-".

    TVM itself refuses a ``mattr`` that is not a list of strings.
    """
    triple, given = _triple(cpu), cpu.get("mattr", ())
    texts = given if isinstance(given, Sequence) and all(isinstance(each, str) for each in given) else ()
    for feature in (each for text in texts for each in text.split(",")):
        if feature[:1] not in ("+", "-") or not _knows_feature(feature[1:], triple):
            raise PlanError(
                f"LLVM knows no feature {feature!r} of {triple}; the mattr of a target is a list of features by "
                "LLVM's names, each with a + or a -, such as '+avx2' or '+dotprod'"
            )


@cache
def knows_cpu(name: str, triple: str) -> bool:
    """Whether LLVM has a CPU of this name for a triple of any architecture."""
    if triple.startswith(("arm", "aarch64")) and not _ARM.match(triple):
        return False
    with _silenced():
        return bool(tvm.target.codegen.llvm_is_valid_cpu(name, triple))


@cache
def _knows_feature(name: str, triple: str) -> bool:
    """Whether enabling a feature adds it to LLVM's set; LLVM has no list of feature names."""
    with _silenced():
        asked = tvm.target.Target({"kind": "llvm", "mtriple": triple, "mattr": [f"+{name}"]})
        return name in tvm.target.codegen.llvm_get_cpu_features(asked)


@contextmanager
def _silenced() -> Iterator[None]:
    """Redirect standard error to /dev/null: LLVM reports unknown names there."""
    with _SILENCING, Path(os.devnull).open("w") as nothing:
        kept = os.dup(2)
        try:
            os.dup2(nothing.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _triple(cpu: Mapping[str, Any]) -> str:
    return str(cpu.get("mtriple") or tvm.target.codegen.llvm_get_system_triple())
