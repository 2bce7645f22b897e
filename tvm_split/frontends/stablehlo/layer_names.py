"""Name the layer of every operation by its location, in which JAX and TensorFlow record the user's modules.

    "jit(f)/block/conv/tanh"
        words jit(f) block conv tanh, path block conv, layer block/conv
    "max", in a function that is called at "jit(f)/block/jit(relu)"
        words jit(f) block jit(relu) max, path block, layer block/relu
    "cell/tanh", in the second iteration of the loop at "jit(f)/block/rnn/while"
        words jit(f) block rnn while body closed_call cell tanh, path block rnn cell, layer block/rnn/cell@1

The words are those of the location below those of the frame. The path has the user's words, without the operation's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache

from jaxlib.mlir import ir

from tvm_split.frontends.names import UniqueNames

_ESCAPED = re.compile(rb"\\(\\|[0-9A-Fa-f]{2})")
_CALL = re.compile(
    r"(?:jit|pjit|xla_call|core_call|closed_call|remat|checkpoint|shard_map|pallas_call)\(.*\)"
    r"|core_call|closed_call|xla_call|remat2|checkpoint|rematted_computation|custom_jvp_call"
    r"|custom_vjp_call(_jaxpr)?|custom_lin|(Stateful)?PartitionedCall"
)
_BLOCK = re.compile(r"body|cond|branch_\d+_fun")
"""JAX's names for parts of a loop or branch, if they follow the loop's or branch's word."""
_FOLLOWED = re.compile(r"\A([^/;]+)/.*;(?=\1/|(?:Stateful)?PartitionedCall/)", re.DOTALL)
_EINSUM = re.compile(r"([A-Za-z,.]*)->([A-Za-z.]*)")
_AROUND = re.compile(r"(vmap|jvp|transpose|jacfwd|jacrev)\((.*)\)")
_OPENED = re.compile(r"\w+\(")
_INLINED = re.compile(r"(?:jit|pjit)\((.*)\)")


@dataclass(frozen=True, eq=False)
class Frame:
    """One inlined call, loop or branch: its words, the frame around it, and the name of the called function.

    ``has_blocks`` is true for a loop or branch. Its operations have the words of the function around it.
    """

    words: tuple[str, ...] = ()
    outer: Frame | None = None
    name: str = ""
    has_blocks: bool = False

    @property
    def word(self) -> str:
        """The call's name at its call site; the called function's name if the call site has none."""
        return called(self.words[-1]) if len(self.words) > 1 and self._is_said else self.name

    @property
    def _is_said(self) -> bool:
        return bool(self.words) and (self.outer is None or self.words != self.outer.words)

    def words_within(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return all words of an operation inside, from those of its own location.

        These may lack the frame's words: for ``max`` in the call ``block/jit(relu)``, return ``block/jit(relu)/max``.
        """
        words = self.outer.words_within(own) if self.has_blocks and self.outer else own
        scope_words = tuple(word for word in self.words if not is_call(word))
        # Inside a loop, TensorFlow omits the words of calls.
        if self.has_blocks and scope_words and own[: len(scope_words)] == scope_words:
            words = self.words + own[len(scope_words) :]
        return words if words[: len(self.words)] == self.words else self.words + own

    def path_of(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return the user's own words of an operation inside, without those that JAX adds for calls and loops."""
        added = self._added(words)
        return tuple(word for place, word in enumerate(words) if place not in added and not is_call(word))

    def _added(self, words: tuple[str, ...]) -> set[int]:
        """The positions of the words that stand for this loop or branch, and for those around it."""
        added = self.outer._added(words) if self.outer else set()
        length = len(self.words)
        if self.has_blocks and self._is_said and words[:length] == self.words:
            added.add(length - 1)
            if _BLOCK.fullmatch("".join(words[length : length + 1])):
                added.add(length)
        return added

    @property
    def path(self) -> tuple[str, ...]:
        return self.path_of(self.words)


@dataclass(frozen=True)
class Origin:
    """The origin of an operation: its frame, all its words, and the kind of operation.

    ``source`` distinguishes operations with the same words at several places of the user's program. ``is_quiet`` is
    true for operations that only move values: they do not start a new call of a layer.
    """

    frame: Frame
    words: tuple[str, ...]
    kind: str
    source: str
    is_quiet: bool
    path: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.frame.path_of(self.words[:-1]))


Path = tuple[str, ...]
Naming = Callable[[Sequence[Path]], Sequence[Path]]
"""A function from the paths of all operations to the paths for names of layers, in the same order."""


def as_they_are(paths: Sequence[Path]) -> Sequence[Path]:
    """Keep all paths: the naming for sources whose paths are the user's own."""
    return paths


def below_the_network(paths: Sequence[Path]) -> Sequence[Path]:
    """Drop the first word: the naming for sources whose paths begin with the network's name."""
    return [path[1:] for path in paths]


def layers_of(origins: Sequence[Origin], naming: Naming = as_they_are) -> list[str]:
    """Return the layer of each origin, in order.

    An operation in a module without submodules belongs to this module (``block/conv``), or to a further call of it
    (``block/conv@1``) if another module ran in between. In a module with submodules, the module's own operations are
    named by its path and the call (``block/relu``, one layer per call) or the operation (``block/add``), and numbered.
    """
    paths = naming([origin.path for origin in origins])
    containers = {path[:length] for path in paths for length in range(len(path))} | {()}
    names = UniqueNames()
    of_frame: dict[Frame, str] = {}
    calls: dict[tuple[str, ...], int] = {}
    last: Hashable = None
    plain: tuple[Hashable, str] = (None, "")
    layers: list[str] = []
    for origin, path in zip(origins, paths, strict=True):
        key: Hashable = path
        if path not in containers:
            if not origin.is_quiet:
                calls[path] = calls.get(path, -1) + (path != last)
            call = calls.get(path, 0)
            layer = "/".join(path) + (f"@{call}" if call else "")
        elif (frame := _outermost(origin)) is not None:
            if frame not in of_frame:
                of_frame[frame] = names.take("/".join([*path, frame.word]))
            key, layer = frame, of_frame[frame]
        else:
            key = (origin.words, origin.source)
            if plain[0] != key:
                plain = (key, names.take("/".join([*path, _word(origin)])))
            layer = plain[1]
        layers.append(layer)
        if not origin.is_quiet:
            last, plain = key, (plain if plain[0] == key else (None, ""))
    for place in range(len(layers) - 2, -1, -1):
        # Moving values for a call belongs to this call, not to the one before.
        if origins[place].is_quiet and paths[place] == paths[place + 1] and paths[place] not in containers:
            layers[place] = layers[place + 1]
    return layers


def _word(origin: Origin) -> str:
    """The last word, which JAX writes for the operation; the kind of operation if that word is a call."""
    word = origin.words[-1] if origin.words else ""
    return word if word not in ("", "while", "cond") and not is_call(word) else origin.kind


def _outermost(origin: Origin) -> Frame | None:
    """The outermost call or loop around ``origin`` that is still in the same module; None if there is none."""
    outermost = None
    frame: Frame | None = origin.frame
    while frame is not None and frame.words and frame.path == origin.path:
        outermost, frame = frame, frame.outer
    return outermost


def words_of(location: ir.Location) -> tuple[str, ...]:
    """Return the parts of a location's name, such as ``jit(f)``, ``Conv_0``; empty without a name.

    A fused location has the name of its first part with a name. A call site has the caller's name, then the callee's.
    """
    return _words(_name(location))


@cache
def _words(name: str) -> tuple[str, ...]:
    return tuple(_divided(name))


def _name(location: ir.Location) -> str:
    if isinstance(location, ir.FusedLoc):
        return next((name for part in location.locations if (name := _name(part))), "")
    if isinstance(location, ir.CallSiteLoc):
        return "/".join(filter(None, (_name(location.caller), _name(location.callee))))
    if not isinstance(location, ir.NameLoc):
        return ""
    # Not `name_str`: it ends the process where the name is not UTF-8.
    name = _decoded(str(location).removeprefix('loc("').partition('"')[0])
    if name.endswith(":"):
        # TensorFlow writes the kind of operation ("Conv2D:") beside the name, and JAX a scope around it.
        within = _name(location.child_loc)
        return f"{name}/{within}" if within else ""
    # TensorFlow appends "@function" to the operation's name, and joins the names of fused operations by ";", of which
    # the last counts. A "@" or ";" elsewhere is the user's.
    name = _FOLLOWED.sub("", name)
    operation = name.rpartition("/")[2]
    return name.removesuffix(operation) + (operation.partition("@")[0] or operation)


def _decoded(text: str) -> str:
    r"""Decode MLIR's escapes: a backslash is ``\\``, and an unprintable byte of UTF-8 is ``\C3``."""

    def byte(match: re.Match[bytes]) -> bytes:
        return match[1] if match[1] == b"\\" else bytes.fromhex(match[1].decode())

    return _ESCAPED.sub(byte, text.encode()).decode(errors="backslashreplace")


def _divided(name: str) -> list[str]:
    """Split a name at slashes outside parentheses; JAX's ``vmap(block/layer)`` gives the parts inside."""
    parts: list[str] = []
    rest = name.split("/")
    while rest:
        count = 1
        if _OPENED.match(rest[0]):
            beginnings = ((end, "/".join(rest[:end])) for end in range(1, len(rest) + 1))
            count = next((end for end, text in beginnings if text.count("(") == text.count(")")), 1)
        part, rest = "/".join(rest[:count]), rest[count:]
        around = _AROUND.fullmatch(part)
        parts.extend(_divided(around[2]) if around else [part])
    return [part for part in parts if part]


def is_call(word: str) -> bool:
    """Whether ``word`` is one that JAX or TensorFlow writes for a call or an einsum, wherever it occurs.

    ``checkpoint`` counts as JAX's word, although JAX writes it like the name of a user's scope.
    """
    einsum = _EINSUM.fullmatch(word)
    return bool(_CALL.fullmatch(word) or (einsum and set(einsum[2]) <= set(einsum[1])))


def called(word: str) -> str:
    """Return the name of a call or loop from its word: ``relu`` for ``jit(relu)``."""
    inlined = _INLINED.fullmatch(word)
    return (inlined[1] or "call") if inlined else word
