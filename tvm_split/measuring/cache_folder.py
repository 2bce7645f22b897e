"""Where measurements are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "TVM_SPLIT_CACHE"


def cache_folder(subject: str) -> Path:
    """``subject`` in the folder of the variable TVM_SPLIT_CACHE, else in ``tvm-split`` in the user's cache."""
    named = os.environ.get(CACHE_VARIABLE, "")
    if named:
        return Path(named) / subject
    cache = os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache"
    return Path(cache) / "tvm-split" / subject
