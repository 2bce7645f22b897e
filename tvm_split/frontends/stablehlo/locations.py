"""What JAX and TensorFlow wrote into the locations of operations: in which modules of the user's each was made."""

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
    name = _decoded(found[1])
    if name.endswith(":"):
        # TensorFlow writes "Conv2D:", the kind of operation, beside the name; JAX a scope's around it.
        within = _name(found[2] or "")
        return f"{name}/{within}" if within else ""
    # TensorFlow writes a function after the operation's name, and all names of what it made one operation of, of which
    # the last counts; a "@" or ";" elsewhere is the user's.
    name = _FOLLOWED.sub("", name)
    operation = name.rpartition("/")[2]
    return name.removesuffix(operation) + (operation.partition("@")[0] or operation)


def _decoded(text: str) -> str:
    r"""MLIR writes a backslash as ``\\``, and each byte of UTF-8 that is not printed as ``\C3``; others stay so."""

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
    """``text`` around the first ``separator`` that is in no parentheses, brackets or quotation marks."""
    depth, quoted = 0, False
    for place, letter in enumerate(text):
        if letter == '"':  # in a name it is written as \22
            quoted = not quoted
        elif not quoted:
            depth += (letter in "([") - (letter in ")]")
            if depth == 0 and text.startswith(separator, place):
                return text[:place], separator, text[place + len(separator) :]
    return text, "", ""


def _divided(name: str) -> list[str]:
    """The parts between slashes; what JAX writes with parentheses, ``vmap(block/layer)``, is one."""
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
    """Whether JAX or TensorFlow wrote ``word`` for a call or an einsum, wherever it stands.

    ``checkpoint`` is taken for JAX's, which writes it as a scope's name is written.
    """
    einsum = _EINSUM.fullmatch(word)
    return bool(_CALL.fullmatch(word) or (einsum and set(einsum[2]) <= set(einsum[1])))


def is_block(word: str) -> bool:
    """Whether ``word`` is what JAX calls a part of a loop or branch, if it stands right after its word."""
    return bool(_BLOCK.fullmatch(word))


def called(word: str) -> str:
    """What a call or loop is called: ``jit(relu)`` is ``relu``."""
    inlined = _INLINED.fullmatch(word)
    return (inlined[1] or "call") if inlined else word
