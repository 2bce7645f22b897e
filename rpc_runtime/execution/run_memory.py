"""What a stage's run may ask of TVM's machine where its kernels are recorded, and the memory that it gets. Pure.

A recorded kernel has the addresses that it was launched with. So a run must ask for the same memory each time, and gets
the same each time; nobody else has it as long as the recording lives. And all that a run does must be on the stream:
what TVM's machine does on the host beside kernels is known by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Storage = Any
Request = tuple[Sequence[int], int, str, str]
"""Of memory: its shape, the position of its device, its dtype and scope."""

ON_THE_HOST_ALONE = frozenset(
    f"vm.builtin.{name}"
    for name in (
        *("alloc_storage", "alloc_tensor", "alloc_shape_heap", "null_value", "copy", "reshape"),
        *("make_tuple", "tuple_getitem", "tuple_reset_item", "shape_of", "make_shape", "make_prim_value"),
        *("match_shape", "match_prim_value", "check_tensor_info", "check_shape_info", "check_prim_value_info"),
        *("check_tuple_info", "check_func_info", "check_string_info"),
    )
)
"""TVM 0.27's builtins that read no content of a tensor and write none: of shapes, of references, of memory."""


class NotRecordable(Exception):
    """Why a stage's kernels cannot be recorded, in words."""


def require_recordable(called: Iterable[str], kernels: Callable[[str], bool]) -> None:
    """Compares what a run calls with what can be recorded; ``kernels`` says whether a name is one of its library's.

    Raises:
        NotRecordable: names the functions.
    """
    wrong = [name for name in dict.fromkeys(called) if name not in ON_THE_HOST_ALONE and not kernels(name)]
    if wrong:
        raise NotRecordable(f"it calls {', '.join(wrong)}, which cannot be recorded")


class RunMemory:
    """Hands out, in each run of one thread, what the first run was given, in the same order. Others get their own.

    ``allocate(context, *request)`` is TVM's own way to get memory, for TVM's machine ``context``.
    """

    def __init__(self, allocate: Callable[..., Storage]) -> None:
        self._allocate = allocate
        self._thread = threading.get_ident()
        self._held: list[tuple[Request, Storage]] = []
        self._next = 0
        self.context: Any = None
        """Of the machine that asked last."""

    @property
    def held(self) -> list[tuple[Request, Storage]]:
        """All that was given, and what was asked for."""
        return self._held

    def begin(self) -> None:
        """A run begins."""
        self._next = 0

    def give(self, context: Any, shape: Sequence[int], device: int, dtype: Any, scope: str) -> Storage:
        """In the place of ``vm.builtin.alloc_storage``.

        Raises:
            NotRecordable: this run asks for other memory than the one before.
        """
        if threading.get_ident() != self._thread:
            return self._allocate(context, shape, device, dtype, scope)
        self.context = context
        request: Request = (tuple(shape), int(device), str(dtype), str(scope))
        if self._next == len(self._held):
            self._held.append((request, self._allocate(context, shape, device, dtype, scope)))
        before, storage = self._held[self._next]
        if request != before:
            raise NotRecordable(f"it asks for memory of {request} where the run before had {before}")
        self._next += 1
        return storage
