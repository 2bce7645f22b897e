"""Name the layer of every operation of a program, by the words in the operations' locations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tvm_split.frontends.normal_form import UniqueNames
from tvm_split.frontends.stablehlo.locations import called, is_block, is_call


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
        """Return the full words of an operation inside; a function's operations may lack the words of its caller."""
        words = self.outer.words_within(own) if self.has_blocks and self.outer else own
        said = tuple(word for word in self.words if not is_call(word))
        if self.has_blocks and said and own[: len(said)] == said:  # inside a loop, TensorFlow omits words of calls
            words = self.words + own[len(said) :]
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
            if is_block("".join(words[length : length + 1])):
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

    An operation in a module without submodules belongs to this module (``block/conv``). If another module ran in
    between, it is a further call (``block/conv@1``). In a module with submodules, the module's own operations are named
    by its path and the call (``block/relu``, one layer per call) or the operation (``block/add``), and numbered.
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
            layer = _numbered(path, calls.get(path, 0))
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


def _numbered(path: tuple[str, ...], call: int) -> str:
    return "/".join(path) + (f"@{call}" if call else "")


def _outermost(origin: Origin) -> Frame | None:
    """The outermost call or loop around ``origin`` that is still in the same module; None if there is none."""
    found = None
    frame: Frame | None = origin.frame
    while frame is not None and frame.words and frame.path == origin.path:
        found, frame = frame, frame.outer
    return found
