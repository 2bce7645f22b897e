"""What JAX and TensorFlow wrote into the locations of operations: in which modules of the user's each was made."""

from __future__ import annotations

import re
from functools import cache

_NAMED = re.compile(r'\A"((?:[^"\\]|\\.)*)"(?!:\d)')
_STRUCTURE = re.compile(
    r"(jit|pjit|xla_call|core_call|closed_call|remat\d?|checkpoint|rematted_computation|shard_map|custom_jvp_call"
    r"|custom_vjp_call(_jaxpr)?|custom_lin|while|cond|body|scan|branch_\d+_fun|pallas_call|(Stateful)?PartitionedCall)(\(.*\))?|.*->.*"
)
_AROUND = re.compile(r"(vmap|jvp|transpose|jacfwd|jacrev)\((.*)\)")
_INLINED = re.compile(r"(?:jit|pjit)\((.*)\)")


@cache
def words_of(location: str) -> tuple[str, ...]:
    """The parts of the name in ``str(location)``: ``jit(f)``, ``Conv_0``, ``conv_general_dilated``; none, if unnamed.

    Of fused locations the first that has a name counts, of call sites the callee under the caller.
    """
    return tuple(_divided(_name(location.removeprefix("loc(").removesuffix(")"))))


def _name(text: str) -> str:
    if text.startswith("fused"):
        parts = _listed(text[text.index("[") + 1 : text.rindex("]")])
        return next((name for part in parts if (name := _name(part.strip()))), "")
    if text.startswith("callsite("):
        callee, _, caller = _outside(text[len("callsite(") : -1], " at ")
        return "/".join(filter(None, (_name(caller), _name(callee))))
    found = _NAMED.match(text)
    if not found:
        return ""
    name = found[1].encode().decode("unicode_escape") if "\\" in found[1] else found[1]
    # TensorFlow writes "Conv2D:", the kind of operation, and then the name; and a name may end in what was made of it.
    return "" if name.endswith(":") else name.partition("@")[0].rpartition(";")[2]


def _listed(text: str) -> list[str]:
    parts = []
    while text:
        part, _, text = _outside(text, ", ")
        parts.append(part)
    return parts


def _outside(text: str, separator: str) -> tuple[str, str, str]:
    """``text`` around the first ``separator`` that is in no parentheses, brackets or quotation marks."""
    depth, quoted = 0, False
    for place, letter in enumerate(text):
        if letter == '"' and text[place - 1 : place] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (letter in "([") - (letter in ")]")
            if depth == 0 and text.startswith(separator, place):
                return text[:place], separator, text[place + len(separator) :]
    return text, "", ""


def _divided(name: str) -> list[str]:
    parts = []
    while name:
        part, _, name = _outside(name, "/")
        around = _AROUND.fullmatch(part)
        parts.extend(_divided(around[2]) if around else [part])
    return [part for part in parts if part]


def path_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """The user's own words among ``words``: what JAX adds of calls, loops and transformations left out."""
    return tuple(word for word in words if not _STRUCTURE.fullmatch(word))


def called(word: str) -> str:
    """What a call or loop is called: ``jit(relu)`` is ``relu``."""
    inlined = _INLINED.fullmatch(word)
    return (inlined[1] or "call") if inlined else word
