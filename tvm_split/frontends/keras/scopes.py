"""Convert the scopes of a TensorFlow export to the names of layers in Keras."""

from __future__ import annotations

import re
from collections.abc import Sequence

Words = tuple[str, ...]

_COUNTED = re.compile(r"(.+)_\d+")


def scopes_of_keras(paths: Sequence[Words]) -> list[Words]:
    """Return the paths of layers in Keras for TensorFlow's scopes.

    On export, Keras builds the network again, and TensorFlow numbers the repeated scopes: ``net_1/conv_1`` is ``conv``.
    A layer called twice has the scopes ``block_1`` and ``block_3``. This holds only if the scopes of the network and of
    all layers directly below it are numbered; otherwise scopes are returned unchanged.
    """
    if not are_counted(paths):
        return list(paths)
    return [tuple(_uncounted(word) for word in path[1:]) for path in paths]


def _uncounted(word: str) -> str:
    found = _COUNTED.fullmatch(word)
    return found[1] if found else word


def are_counted(paths: Sequence[Words]) -> bool:
    """Whether all paths are below one network, and its word and those directly below it are numbered."""
    roots = {path[:1] for path in paths if path}
    return len(roots) == 1 and all(is_counted(word) for path in paths for word in path[:2])


def is_counted(word: str) -> bool:
    return _COUNTED.fullmatch(word) is not None
