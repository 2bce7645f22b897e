"""Names of variables, which read like the source's names, and names of layers from TensorFlow's scopes."""

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

Words = tuple[str, ...]
Path = Sequence[Any]
"""The keys, attributes and positions that lead to a part of a nested value, also in the form of JAX's pytrees."""

_WORDS_OF_TVMSCRIPT = frozenset({"R", "T", "I", "tir", "relax", "cls", "main"})
_COUNTED = re.compile(r"(.+)_\d+")


def identifier(layer: str) -> str:
    """Return a valid Python and TVMScript identifier similar to ``layer``: ``layer1.0.conv1`` → ``layer1_0_conv1``."""
    name = re.sub(r"\W+", "_", layer, flags=re.ASCII).strip("_") or "value"
    if name[0].isdigit():
        name = f"layer_{name}"
    if keyword.iskeyword(name) or name in _WORDS_OF_TVMSCRIPT:
        name = f"{name}_"
    return name


class UniqueNames:
    """Make names unique: the second ``conv`` becomes ``conv_1``."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def take(self, wanted: str) -> str:
        name = wanted
        while name in self._taken:
            self._counts[wanted] = self._counts.get(wanted, 0) + 1
            name = f"{wanted}_{self._counts[wanted]}"
        self._taken.add(name)
        return name


def output_names(paths: Sequence[Path]) -> list[str]:
    """Return the outputs' names by their paths: ``logits``, ``hidden.0``; ``output_0`` for one with positions only."""
    keys = [[getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path] for path in paths]
    return [
        ".".join(map(str, path)) if any(isinstance(key, str) for key in path) else f"output_{place}"
        for place, path in enumerate(keys)
    ]


def paths_in(value: Any, above: Words = ()) -> Iterator[tuple[Any, Path]]:
    """Yield the leaves of nested mappings, sequences, named tuples and dataclasses, each with its path."""
    if isinstance(value, Mapping):
        parts: Any = value.items()
    elif isinstance(value, list | tuple):
        parts = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value):
        parts = ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        yield value, above
        return
    for key, part in parts:
        yield from paths_in(part, (*above, key))


def scopes_of_keras(paths: Sequence[Words]) -> list[Words]:
    """Return the paths of layers in Keras for TensorFlow's scopes.

    On export, Keras builds the network again, and TensorFlow numbers the repeated scopes: ``net_1/conv_1`` is ``conv``.
    A layer called twice has the scopes ``block_1`` and ``block_3``. This holds only if the scopes of the network and of
    all layers directly below it are numbered; otherwise scopes are returned unchanged.
    """
    if not are_counted(paths):
        return list(paths)
    return [tuple(_COUNTED.sub(r"\1", word) if is_counted(word) else word for word in path[1:]) for path in paths]


def are_counted(paths: Sequence[Words]) -> bool:
    """Whether all paths are below one network, and it and the layers directly below it end in a number (``net_1``)."""
    roots = {path[:1] for path in paths if path}
    return len(roots) == 1 and all(is_counted(word) for path in paths for word in path[:2])


def is_counted(word: str) -> bool:
    return _COUNTED.fullmatch(word) is not None
