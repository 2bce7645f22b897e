"""Parse the locations of operations, in which JAX and TensorFlow record the user's modules."""

from __future__ import annotations

import re
from functools import cache

_NAMED = re.compile(r'\A"([^"]*)"(?!:\d)(?:\((.*)\)\Z)?', re.DOTALL)
_ESCAPED = re.compile(rb"\\(\\|[0-9A-Fa-f]{2})")
_CALL = re.compile(
    r"(?:jit|pjit|xla_call|core_call|closed_call|remat|checkpoint|shard_map|pallas_call)\(.*\)"
    r"|core_call|closed_call|xla_call|remat2|checkpoint|rematted_computation|custom_jvp_call"
    r"|custom_vjp_call(_jaxpr)?|custom_lin|(Stateful)?PartitionedCall"
)
_BLOCK = re.compile(r"body|cond|branch_\d+_fun")
_FOLLOWED = re.compile(r"\A([^/;]+)/.*;(?=\1/|(?:Stateful)?PartitionedCall/)", re.DOTALL)
_EINSUM = re.compile(r"([A-Za-z,.]*)->([A-Za-z.]*)")
_AROUND = re.compile(r"(vmap|jvp|transpose|jacfwd|jacrev)\((.*)\)")
_OPENED = re.compile(r"\w+\(")
_INLINED = re.compile(r"(?:jit|pjit)\((.*)\)")


@cache
def words_of(location: str) -> tuple[str, ...]:
    """Return the parts of the name in ``str(location)``, such as ``jit(f)``, ``Conv_0``; empty without a name.

    A fused location has the name of its first part with a name. A call site has the caller's name, then the callee's.
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
    name = _decoded(found[1])
    if name.endswith(":"):
        # TensorFlow writes the kind of operation ("Conv2D:") beside the name, and JAX a scope around it.
        within = _name(found[2] or "")
        return f"{name}/{within}" if within else ""
    # TensorFlow appends "@function" to the operation's name, and joins the names of fused operations by ";", of which
    # the last counts. A "@" or ";" elsewhere is the user's.
    name = _FOLLOWED.sub("", name)
    operation = name.rpartition("/")[2]
    return name.removesuffix(operation) + (operation.partition("@")[0] or operation)


def _decoded(text: str) -> str:
    r"""Decode MLIR's escapes: a backslash is ``\\``, and an unprintable byte of UTF-8 is ``\C3``."""

    def byte(found: re.Match[bytes]) -> bytes:
        return found[1] if found[1] == b"\\" else bytes.fromhex(found[1].decode())

    return _ESCAPED.sub(byte, text.encode()).decode(errors="backslashreplace")


def _listed(text: str) -> list[str]:
    parts = []
    while text:
        part, _, text = _outside(text, ", ")
        parts.append(part)
    return parts


def _outside(text: str, separator: str) -> tuple[str, str, str]:
    """Partition ``text`` at the first ``separator`` outside parentheses, brackets and quotation marks."""
    depth, quoted = 0, False
    for place, letter in enumerate(text):
        if letter == '"':  # a quotation mark inside a name is written as \22
            quoted = not quoted
        elif not quoted:
            depth += (letter in "([") - (letter in ")]")
            if depth == 0 and text.startswith(separator, place):
                return text[:place], separator, text[place + len(separator) :]
    return text, "", ""


def _divided(name: str) -> list[str]:
    """Split a name at slashes outside parentheses; JAX's ``vmap(block/layer)`` gives the parts inside."""
    parts: list[str] = []
    rest = name.split("/")
    while rest:
        count = 1
        if _OPENED.match(rest[0]):
            ends = (end for end in range(1, len(rest) + 1) if _is_balanced("/".join(rest[:end])))
            count = next(ends, 1)
        part, rest = "/".join(rest[:count]), rest[count:]
        around = _AROUND.fullmatch(part)
        parts.extend(_divided(around[2]) if around else [part])
    return [part for part in parts if part]


def _is_balanced(text: str) -> bool:
    return text.count("(") == text.count(")")


def is_call(word: str) -> bool:
    """Whether JAX or TensorFlow wrote ``word`` for a call or an einsum, at any position.

    ``checkpoint`` counts as JAX's word, although JAX writes it like the name of a user's scope.
    """
    einsum = _EINSUM.fullmatch(word)
    return bool(_CALL.fullmatch(word) or (einsum and set(einsum[2]) <= set(einsum[1])))


def is_block(word: str) -> bool:
    """Whether ``word`` is JAX's name for a part of a loop or branch, if it follows the loop's or branch's word."""
    return bool(_BLOCK.fullmatch(word))


def called(word: str) -> str:
    """Return the name of a call or loop from its word: ``relu`` for ``jit(relu)``."""
    inlined = _INLINED.fullmatch(word)
    return (inlined[1] or "call") if inlined else word
