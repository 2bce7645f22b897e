"""TVM without torch, whose import takes more than a second, and that no command needs but for models of torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HIDDEN = "torch"
LOOKING = ("tvm_ffi", "tvm")


class _HiddenFromTvm(MetaPathFinder):
    """Comes before all other finders: what is not found here is asked of the next."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == HIDDEN and any(map(_is_loading, LOOKING)):
            raise ModuleNotFoundError(f"{HIDDEN} is imported by whoever needs it, and not by TVM", name=HIDDEN)
        return None


def hide_torch_from_tvm() -> None:
    """While TVM is imported, it finds no torch, as if there were none; all others do, before and afterwards.

    TVM imports it wherever it is installed, to take torch's tensors as its own; ours are numpy's. For a process of our
    own: in another one, somebody might hand it such tensors.
    """
    sys.meta_path.insert(0, _HiddenFromTvm())


def _is_loading(name: str) -> bool:
    """As ``importlib`` has it, which tells circular imports by this."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)
