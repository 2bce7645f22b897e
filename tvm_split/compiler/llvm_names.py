"""Which CPUs and features LLVM knows: what it does not know, it leaves out, or compiles for any."""

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
"""Asked about another architecture whose name begins so, LLVM 22 ends the process."""
_SILENCING = threading.Lock()
"""Of two at a time, the later would put back what the other had put there."""


def require_known_cpu(cpu: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for a CPU that LLVM does not know: about one it writes a page, and compiles for any.

    Asked about a processor of which it knows not even the architecture it ends the process.
    """
    name, triple = str(cpu.get("mcpu", "generic")), _triple(cpu)
    if not knows_cpu(name, triple):
        raise PlanError(
            f"LLVM knows no CPU {name!r} for {triple}; give the target an mcpu and mtriple that it knows, or "
            "leave out the machine's target: then it is what the machine's worker says"
        )


def require_known_features(cpu: Mapping[str, Any]) -> None:
    """Raise a `PlanError` for what LLVM leaves out of ``mattr``, and for a name without a sign, which it takes for one
    with a minus. What is no list of texts is TVM's to refuse."""
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
    """Whether LLVM has a CPU of this name for a triple, of whatever architecture."""
    if triple.startswith(("arm", "aarch64")) and not _ARM.match(triple):
        return False
    with _silenced():
        return bool(tvm.target.codegen.llvm_is_valid_cpu(name, triple))


@cache
def _knows_feature(name: str, triple: str) -> bool:
    """There is no list of all: whether it has any effect is what can be asked."""
    with _silenced():
        asked = tvm.target.Target({"kind": "llvm", "mtriple": triple, "mattr": [f"+{name}"]})
        return name in tvm.target.codegen.llvm_get_cpu_features(asked)


@contextmanager
def _silenced() -> Iterator[None]:
    """Standard error leads nowhere, where LLVM writes about what it does not know, beside what it answers."""
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
