"""The layer of every operation of a program, from the words of their locations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tvm_split.frontends.normal_form import UniqueNames
from tvm_split.frontends.stablehlo.locations import called, is_block, is_call


@dataclass(frozen=True, eq=False)
class Frame:
    """One call or loop that was put in place of itself: its words, the frame that it is in, and what is called.

    ``has_blocks``: it is a loop or branch, whose operations are named as the function is that it stands in.
    """

    words: tuple[str, ...] = ()
    outer: Frame | None = None
    name: str = ""
    has_blocks: bool = False

    @property
    def word(self) -> str:
        """What it is called where it is called; the function's own name where nothing is said there."""
        return called(self.words[-1]) if len(self.words) > 1 and self._is_said else self.name

    @property
    def _is_said(self) -> bool:
        return bool(self.words) and (self.outer is None or self.words != self.outer.words)

    def words_within(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """The words of an operation in it; a called function has them without its caller's, or with."""
        words = self.outer.words_within(own) if self.has_blocks and self.outer else own
        said = tuple(word for word in self.words if not is_call(word))
        if self.has_blocks and said and own[: len(said)] == said:  # TensorFlow leaves its calls out within a loop
            words = self.words + own[len(said) :]
        return words if words[: len(self.words)] == self.words else self.words + own

    def path_of(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """The user's own among the words of an operation in it: what JAX adds of calls and loops left out."""
        added = self._added(words)
        return tuple(word for place, word in enumerate(words) if place not in added and not is_call(word))

    def _added(self, words: tuple[str, ...]) -> set[int]:
        """The places of the words that are of this frame, and of those around it."""
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
    """Where an operation comes from: its frame, all its words, and the kind of operation.

    ``source`` tells apart what has the same words at several places of the user's program. ``is_quiet``: it only brings
    values into place, which says nothing of what is computed when.
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
"""From the paths of all operations to those that make up the layers' names, in the same order."""


def as_they_are(paths: Sequence[Path]) -> Sequence[Path]:
    """The naming for sources whose paths are the user's own."""
    return paths


def below_the_network(paths: Sequence[Path]) -> Sequence[Path]:
    """The naming for sources whose paths begin with the network's own name."""
    return [path[1:] for path in paths]


def layers_of(origins: Sequence[Origin], naming: Naming = as_they_are) -> list[str]:
    """A layer for each origin, in order.

    An operation in a module without modules of its own belongs to that module (``block/conv``); where others were
    computed in between, it is called again (``block/conv@1``). What a module with others in it computes itself is named
    by the call (``block/relu``, one layer each time) or the operation (``block/add``) after its path, and numbered.
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
        # What is brought into place for a call belongs to it, and not to the call before.
        if origins[place].is_quiet and paths[place] == paths[place + 1] and paths[place] not in containers:
            layers[place] = layers[place + 1]
    return layers


def _word(origin: Origin) -> str:
    """The last of the words, which is the operation's in JAX; where that is only a call, the kind of operation."""
    word = origin.words[-1] if origin.words else ""
    return word if word not in ("", "while", "cond") and not is_call(word) else origin.kind


def _numbered(path: tuple[str, ...], call: int) -> str:
    return "/".join(path) + (f"@{call}" if call else "")


def _outermost(origin: Origin) -> Frame | None:
    """The first call or loop that the module which computes ``origin`` made to come there; None if it made none."""
    found = None
    frame: Frame | None = origin.frame
    while frame is not None and frame.words and frame.path == origin.path:
        found, frame = frame, frame.outer
    return found
