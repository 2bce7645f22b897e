"""What TensorFlow calls the layers of Keras when it exports them, and what they are called in Keras."""

from __future__ import annotations

import re
from collections.abc import Sequence

Words = tuple[str, ...]

_COUNTED = re.compile(r"(.+)_\d+")


def scopes_of_keras(paths: Sequence[Words]) -> list[Words]:
    """The paths of layers in Keras, of TensorFlow's scopes.

    Keras builds a network once more when it exports it, and TensorFlow counts scopes on: ``net_1/conv_1`` is ``conv``,
    and what is called again is ``block_3`` after ``block_1``, which is one layer called twice. Only where the network
    and all that is right below it are counted is that so; else scopes are taken as they are.
    """
    if not are_counted(paths):
        return list(paths)
    return [tuple(_uncounted(word) for word in path[1:]) for path in paths]


def _uncounted(word: str) -> str:
    found = _COUNTED.fullmatch(word)
    return found[1] if found else word


def are_counted(paths: Sequence[Words]) -> bool:
    """Whether all are below one network, and it and all that is right below it are counted."""
    roots = {path[:1] for path in paths if path}
    return len(roots) == 1 and all(is_counted(word) for path in paths for word in path[:2])


def is_counted(word: str) -> bool:
    return _COUNTED.fullmatch(word) is not None
